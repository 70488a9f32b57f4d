# numbers follow the planner; what must hold is the verdicts
k() { "$KOILA" plan encoder.kgraph --gpu h100-80gb --torch 2.10 "$@"; }
k --memory 840MiB | grep -E 'batch|fits|fit in' | sed 's/,.*//'; k --memory 840MiB >/dev/null; echo "exit $?"
k --memory 840MiB --slice auto | grep -cE '^fits'; k --memory 840MiB --slice auto >/dev/null; echo "exit $?"
k --memory 600MiB --slice auto >/dev/null; echo "exit $?"
k --slice 4 --json | cut -c1-120
