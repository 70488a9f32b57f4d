sed 's/"train.py"/"<script>alert(1)<\/script>\&\\u0007\\u202e.py"/g' step.json >evil.json
"$KOILA" report evil.json -o page.html; echo "exit $?"
grep -c '<script' page.html
grep -o '&lt;script&gt;alert(1)&lt;/script&gt;&amp;[^:<]*' page.html | head -1
"$KOILA" simulate evil.json --torch 2.10 2>/dev/null | grep peak
"$KOILA" report step.pickle -o /nonexistent/page.html; echo "exit $?"
"$KOILA" report step.pickle; echo "exit $?"
