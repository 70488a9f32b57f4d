# the limit is drawn: as given, as the device had it at an out-of-memory, and not where nothing is known
limit() { grep -o '<g class=limit>.*' page.html | grep -o 'limit [^<]*' || echo "no limit"; }
"$KOILA" report easy.pickle -o page.html && limit
"$KOILA" report easy.pickle -o page.html --memory 60MiB --outside 20MiB && limit
"$KOILA" report easy.pickle -o page.html --memory 24GiB && limit
"$KOILA" report easy.pickle -o page.html --memory 10MiB && limit; grep -c 'would not fit' page.html
python3 -c "
import json
d = json.load(open('step.json'))
for e in d['device_traces'][0]:
    if e['action'] == 'oom': e['device_free'] = 5 << 20
json.dump(d, open('oom.json', 'w'))"
"$KOILA" report oom.json -o page.html && limit
"$KOILA" report easy.pickle -o page.html --memory 24G; echo "exit $?"
