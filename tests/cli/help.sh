"$KOILA" --help; "$KOILA" help simulate; "$KOILA" help odd; echo "exit $?"; "$KOILA" simulate --help | head -1; "$KOILA"  | head -1
