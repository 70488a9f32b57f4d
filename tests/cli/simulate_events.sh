"$KOILA" simulate easy.pickle --events events.tsv >/dev/null 2>&1; echo "exit $?"
head -4 events.tsv; wc -l <events.tsv
"$KOILA" simulate easy.pickle --events /nonexistent/x 2>&1; echo "exit $?"
