"$KOILA" plan encoder.kgraph --gpu h100-80gb --memory 840MiB --torch 2.10 | head -9; 
"$KOILA" plan encoder.kgraph --gpu h100-80gb --memory 840MiB --torch 2.10 --slice auto | head -9
"$KOILA" plan encoder.kgraph --gpu h100-80gb --memory 600MiB --torch 2.10 --slice auto >/dev/null; echo "exit $?"
"$KOILA" plan encoder.kgraph --gpu h100-80gb --slice 4 --json | cut -c1-160
