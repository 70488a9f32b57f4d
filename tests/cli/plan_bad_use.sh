for a in "" "mlp.kgraph" "mlp.kgraph --gpu h10" "mlp.kgraph --gpu a100-40gb --slice none" "mlp.kgraph --gpu a100-40gb --sdpa fast" "mlp.kgraph --gpu a100-40gb --optimizer lion" "step.json --gpu a100-40gb" \
         "missing.kgraph --gpu a100-40gb" "mlp.kgraph --gpu step.json" "mlp.kgraph --gpu a100-40gb --memory 10MiB"; do
    "$KOILA" plan $a; echo "exit $?"
done
"$KOILA" plan --list-gpus | head -3
