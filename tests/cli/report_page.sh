"$KOILA" report step.pickle -o page.html --torch 2.10; echo "exit $?"
grep -o '<h2>[^<]*' page.html
grep -c '<script\|http://\|https://' page.html
ls | grep page.html
