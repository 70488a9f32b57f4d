# a misspelt command or option is answered with the nearest; one that is near to nothing is not
for line in "simulat" "helo" "xyzzy" "help plam" "plan --gup x" "simulate --check --max-mem 3" "report --autput x" "plan --quux"; do
    # shellcheck disable=SC2086
    "$KOILA" $line 2>&1 | grep -v '^ *usage\|^ *koila '
done
"$KOILA" run train.py; echo "exit $?"; "$KOILA" run --help | head -1; "$KOILA" help run | head -3
