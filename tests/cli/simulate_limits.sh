# what reading may take: the message names the limit, the next line the option that raises it
"$KOILA" simulate step.pickle --max-memory 100kB; echo "exit $?"
"$KOILA" simulate step.pickle --max-string 5B; echo "exit $?"
"$KOILA" simulate step.json --max-nesting 3; echo "exit $?"
"$KOILA" report step.json --max-nesting=3 -o page.html; echo "exit $?"
"$KOILA" simulate step.json --max-nesting 0 2>&1 | head -1
"$KOILA" simulate step.pickle --max-memory 1MiB --max-string 1kB --max-nesting 9 --torch 2.10 2>/dev/null | head -1
