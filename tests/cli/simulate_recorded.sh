# what torch 2.13's own allocator recorded, on segments at falling addresses: ties go to the oldest one; a MemPool dies; another never splits
"$KOILA" simulate torch213.pickle --check; echo "exit $?"
"$KOILA" simulate torch213.pickle --check --torch 2.11 2>/dev/null | sed -n 2p
