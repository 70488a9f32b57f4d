# without --device the first device that recorded something
python3 -c "
import json
d = json.load(open('step.json'))
for g in d['segments']: g['device'] = 2
d['device_traces'] = [[], [], d['device_traces'][0]]
json.dump(d, open('third.json', 'w'))"
"$KOILA" simulate third.json --torch 2.10 2>/dev/null | head -2
"$KOILA" simulate third.json --torch 2.10 --device 1 2>/dev/null | head -2
"$KOILA" report third.json -o page.html && grep -o '<p>device [0-9]*, [0-9]* events' page.html
