# a file appears whole or not at all; a pipe or a device is written as it is and stays one; a link stays a link
mkfifo pipe; cat pipe >got & "$KOILA" report step.pickle -o pipe; echo "exit $?"; wait
test -p pipe && tail -c 15 got | grep -o '</html>'
echo old >target; ln -s target link; "$KOILA" simulate easy.pickle --events link >/dev/null 2>&1; test -L link && head -1 target | cut -c1-12
"$KOILA" report step.pickle -o /dev/full; echo "exit $?"
"$KOILA" simulate easy.pickle --events /dev/full 2>&1 | grep -v note
"$KOILA" report step.pickle -o .; echo "exit $?"
ls -a | grep -E '^(target|link|pipe|[.]+)[.]......$' || echo "nothing temporary is left"
