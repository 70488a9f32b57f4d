# one address of the recording is changed: it is noticed, and --check says so by its exit code
python3 - <<'PY' 2>/dev/null || exit 9
import json
d = json.load(open("step.json"))
e = next(e for e in d["device_traces"][0] if e["action"] == "alloc" and e["size"] > 4000000)
e["size"] += 4096
json.dump(d, open("changed.json", "w"))
PY
"$KOILA" simulate changed.json --check --torch 2.10
