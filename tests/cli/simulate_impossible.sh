# a whole recording that frees what is not allocated is no recording; in a window of one, entries may be missing; so with torch's skip_actions
cut_json() { python3 -c "
import json, sys
d = json.load(open('step.json')); t = d['device_traces'][0]
$1
json.dump(d, open('odd.json', 'w'))"; }
cut_json "t.insert(20, dict(t[0], action='free_requested', addr=0xdead000))"
"$KOILA" simulate odd.json --torch 2.10; echo "exit $?"
cut_json "t.insert(20, dict(t[0], action='free_requested', addr=0xdead000)); del t[:4]"
"$KOILA" simulate odd.json --torch 2.10 --check 2>&1 | grep replay; echo "exit $?"
cut_json "t[:] = [e for e in t if e['action'] != 'free_completed']"
"$KOILA" simulate odd.json --torch 2.10 2>&1 | grep -o 'not checkable: entries are missing'
cut_json "t[20]['action'] = 'resize'"
"$KOILA" simulate odd.json; echo "exit $?"
cut_json "del t[:]; d['device_traces'].append([{'action': 'alloc', 'addr': 1 << 20, 'size': 100, 'stream': 0}, {'action': 'alloc', 'size': 1}])"
"$KOILA" simulate odd.json 2>&1 | head -1
