printf '[{"device":0,"address":4096,"total_size":2097152,"allocated_size":512,"active_size":512,"stream":0,"segment_type":"small","blocks":[{"address":4096,"size":512,"requested_size":400,"state":"active_allocated","frames":[]},{"address":4608,"size":2096640,"requested_size":0,"state":"inactive","frames":[]}]}]' >state.json
"$KOILA" simulate state.json; echo "exit $?"
printf '{"segments":[],"device_traces":[[]]}' >nothing.json; "$KOILA" simulate nothing.json | head -2
"$KOILA" report state.json -o state.html && grep -c svg state.html
