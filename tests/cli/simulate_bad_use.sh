for a in "" "x y" "--memory 24G step.pickle" "--odd step.pickle" "step.pickle --torch two" "step.pickle --torch 1.9" "step.pickle --device 7" "step.pickle --conf max_split_size_mb=5" \
         "step.pickle --conf max_split=5" "step.pickle --conf backend=cudaMallocAsync" "step.pickle --memory" "missing.pickle" "--device x step.pickle"; do
    "$KOILA" simulate $a; echo "exit $?"
done
"$KOILA" odd; echo "exit $?"
