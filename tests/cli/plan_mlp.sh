"$KOILA" plan mlp.kgraph --gpu a100-40gb --torch 2.10 --optimizer adam
