# the manual page and the help name the same options, and each is taken (an unknown one would say so)
MAN=$DATA/../../docs/koila.1
for c in simulate report plan run; do
    for o in $("$KOILA" help $c | grep -o -- '--[a-z][a-z-]*' | sort -u); do
        grep -q -- "$(echo "$o" | sed 's/-/\\\\-/g')" "$MAN" || echo "$c $o is not in the manual page"
        case $o in --[a-z-]*) "$KOILA" $c "$o" 2>&1 | grep -q 'no option' && echo "$c does not take $o" ;; esac
    done
done
for o in $(grep -o -- '\\-\\-[a-z\\-]*' "$MAN" | sed 's/\\f.*//; s/\\//g' | sort -u); do
    { "$KOILA" help simulate; "$KOILA" help report; "$KOILA" help plan; "$KOILA" help run; } | grep -q -- "$o" || echo "$o of the manual page is in no help"
done
echo checked
