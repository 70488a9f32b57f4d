# no file makes a large page: here every name is long and odd, every stack deep, every block its own segment
python3 -c "
import json
name = '<&\u202e\u0007\"' * 60
def frames(i): return [{'name': name + str(i), 'filename': name + '%d.py' % k, 'line': i} for k in range(40)]
trace, segments, at = [], [], 0x700000000000
for i in range(150):
    for a in ('segment_alloc', 'alloc'):
        trace.append({'action': a, 'addr': at, 'size': 20971520, 'stream': i, 'time_us': 5 * i + 1, 'frames': frames(i % 2) if a == 'alloc' else []})
    segments.append({'device': 0, 'address': at, 'total_size': 20971520, 'allocated_size': 20971520, 'active_size': 20971520, 'stream': i, 'segment_type': 'large',
                     'blocks': [{'address': at, 'size': 20971520, 'requested_size': 20971520, 'state': 'active_allocated', 'frames': []}]})
    at += 20971520
notes = [{'name': name + str(i), 'stage': 'START', 'time_us': i, 'device': 0} for i in range(4)] + [{'name': name, 'stage': 'START', 'time_us': i, 'device': 0} for i in range(600)]
json.dump({'segments': segments, 'device_traces': [trace], 'allocator_settings': {'PYTORCH_CUDA_ALLOC_CONF': ''}, 'external_annotations': notes}, open('hostile.json', 'w'))"
"$KOILA" report hostile.json -o page.html --top 200; echo "exit $?"
test "$(wc -c <page.html)" -le 5242880 && echo "at most 5 MiB"
grep -c 'the page is full' page.html | sed 's/^[1-9][0-9]*$/some stacks left out/'
grep -c '</html>' page.html
grep -c "$(printf '\007')" page.html
