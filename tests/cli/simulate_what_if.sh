"$KOILA" simulate step.pickle --memory 1GiB --torch 2.10; echo "exit $?"
"$KOILA" simulate step.pickle --memory 60MiB --torch 2.10; echo "exit $?"
"$KOILA" simulate step.pickle --memory 80MB --conf expandable_segments=True --torch 2.10; echo "exit $?"
