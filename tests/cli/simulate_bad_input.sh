: >empty; printf 'PK\003\004' >zip; printf 'hello' >text; head -c 300 step.pickle >cut; printf '\200\002cos\nsystem\n(S"x"\ntR.' >evil; printf '{"model":1,"optimizer":2}' >other; printf '{"segments":[] 1' >bad
printf '\200\002]\033[31m' >control
for f in empty zip text cut evil other bad control .; do "$KOILA" simulate $f; echo "exit $?"; done
