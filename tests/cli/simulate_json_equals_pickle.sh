"$KOILA" simulate step.pickle --json 2>/dev/null | sed 's/step.pickle/FILE/' >a
"$KOILA" simulate step.json --json 2>/dev/null | sed 's/step.json/FILE/' >b
cmp a b && echo same
"$KOILA" simulate - --json <step.pickle 2>/dev/null | sed 's/"file":"-"/"file":"FILE"/' | cmp - a && echo "same from standard input"
cut -c1-400 a
