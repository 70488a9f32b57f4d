# the rows of bad input that simulate_bad_input.sh and simulate_impossible.sh leave: each says what is the matter, at which byte or entry, and what to do
seg='"segments":[{"device":0,"address":4096,"total_size":2097152,"stream":0,"segment_type":"small","blocks":[{"address":4096,"size":512,"requested_size":400,"state":"active_allocated"},{"address":4608,"size":2096640,"state":"inactive"}]}]'
trace() { printf '{%s,"device_traces":[[%s]]}' "$seg" "$2" >$1; }
printf '\037\213\010\000abc' >gzip; printf '\200\011.' >protocol
printf '\200\002(lR.' >reduce; printf '\200\002a.' >underflow; printf '\200\002]e.' >no_mark; printf '\200\002h\005.' >memo_miss; printf '\200\002]q\000h\000a.' >itself; printf '\200\002](}q\000h\000h\000e.' >twice
printf '\200\002\212\050\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001\001.' >long_integer
trace size_2_63 '{"action":"segment_alloc","addr":4096,"size":9223372036854775808,"stream":0}'
trace size_minus '{"action":"alloc","addr":4096,"size":400,"stream":0},{"action":"alloc","addr":8192,"size":-1,"stream":0}'
trace action '{"action":"resize","addr":4096,"size":400,"stream":0}'
trace no_addr '{"action":"alloc","size":400,"stream":0}'
trace string_size '{"action":"alloc","addr":4096,"size":"big","stream":0}'
trace float_size '{"action":"alloc","addr":4096,"size":1.5,"stream":0}'
trace nan '{"action":"alloc","addr":4096,"size":NaN,"stream":0}'
trace no_comma '{"action":"alloc" "addr":4096}'
trace live_twice '{"action":"segment_alloc","addr":4096,"size":2097152,"stream":0},{"action":"alloc","addr":4096,"size":400,"stream":0},{"action":"alloc","addr":4096,"size":400,"stream":0}'
printf '%s' "{$seg}" | sed 's/2096640/2096128/' >gap; printf '%s' "{$seg}" | sed 's/"inactive"/"asleep"/' >state; printf '%s' "{$seg}" | sed 's/"total_size":2097152/"total_size":4194304/' >total
printf '{%s}' "$seg" | sed 's/"segments":\[\(.*\)\]$/&/; s/\(.*\)"segments":\[\({.*}\)\]}$/\1"segments":[\2,\2]}/' >overlap
for f in gzip protocol reduce underflow no_mark memo_miss itself twice long_integer size_2_63 size_minus action no_addr string_size float_size nan no_comma live_twice gap state total overlap; do
    "$KOILA" simulate $f; echo "exit $?"
done
