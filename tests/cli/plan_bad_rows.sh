# files and options that `koila plan` refuses: the field or the line, the reason, what to do
graph() { printf 'koila graph 1\n%s\n' "$1" >$2; }
graph 'axis x' axis; graph '' nothing; graph '%0 = odd' leaf; graph '%0 = real f33[2]' dtype; graph '%0 = real f32[2' cut; printf 'koila graph 9\n' >newer; : >empty; printf 'koila graph 2\naxis 3\n%%0 = real f32[2]\n' >early; printf 'koila graph 2\nend 0 1\n' >count
printf 'koila graph 1\n%%0 = real f32[2]\n%%1 = aten::relu(%%7) -> f32[2]\n' >unknown_value; printf 'koila graph 1\n%%0 = real f32[9223372036854775807, 4]\n%%1 = aten::relu(%%0) -> f32[2]\n' >huge
for f in axis nothing leaf dtype cut newer empty early count unknown_value huge mlp.kgraph.gone; do "$KOILA" plan $f --gpu a100-40gb; echo "exit $?"; done
profile() { printf '{"koila_device": 1, "fields": {%s}}' "$1" >$2; }
field() { printf '"%s": {"value": %s, "how": "vendor"}' $1 $2; }
whole="$(field sm_count 10), $(field compute_capability 86), $(field total_bytes 8000000000), $(field context_bytes 300000000)"
profile "$whole" good; profile "$(field sm_count -3)" negative; profile "$(field sm_count 3)" short; profile "$whole, $(field odd 1)" odd; profile "$(printf '%s' "$whole" | sed 's/vendor/guess/')" how
profile "$(printf '%s' "$whole" | sed 's/8000000000/8/')" tiny; head -c 60 good >half
for f in negative short odd how tiny half; do "$KOILA" plan mlp.kgraph --gpu $f; echo "exit $?"; done
"$KOILA" plan mlp.kgraph --gpu good | grep -E '^(fits|does)'
for a in "--memory 24G" "--conf max_split_size_mb=5" "--conf odd=5" "--conf backend=cudaMallocAsync" "--fsdp" "--cublas-workspace 8" "--cublaslt-workspace 1MiB" "--slice 0" "--torch two" "--odd" "--gpu"; do "$KOILA" plan mlp.kgraph --gpu a100-40gb $a 2>&1 | grep -v usage: | grep -v list-gpus; done
"$KOILA" plan mlp.kgraph --gpu h100-80gb --cublas-workspace :16:8 --grad-scaler | grep -E '^fits|CUBLAS' | sed 's/,.*//'
