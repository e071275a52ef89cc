# Shared by the scripts of the kit; sourced, not run. Defines where results go, finds the CUDA libraries, and runs
# steps with a time limit. Each step adds one line of JSON to $results and its output to $log.

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${OUT:=target/gpu-kit}"
mkdir -p "$OUT"
script=$(basename "$0" .sh)
results=$OUT/$script.jsonl
log=$OUT/$script.log
: > "$results"
: > "$log"
# Seconds that a script may take: a lent machine stops a command after ten minutes.
limit=${KIT_LIMIT:-570}

# The binaries: packed by prepare.sh, or built on this machine.
if [ -n "${KIT_BIN:-}" ]; then
  bin=$KIT_BIN
elif [ -f .gpu/programs.tar.xz ]; then
  bin=$(mktemp -d)
  trap 'rm -rf "$bin"' EXIT
  tar -xJf .gpu/programs.tar.xz -C "$bin"
else
  echo "run tools/gpu-kit/prepare.sh first, or set KIT_BIN to a folder with the programs ft, gpu, step and generate" >&2
  exit 1
fi
export FT_BIN=$bin/ft FT_ROOT=$PWD FT_REQUIRE_GPU=1 HF_HUB_OFFLINE=1 NO_COLOR=1

# CUDA libraries: those of the loader, of PyTorch's packages, or of a toolkit.
if ldd "$FT_BIN" | grep 'not found' > /dev/null; then
  packages=$(python3 -c 'import nvidia, os; print(os.path.join(list(nvidia.__path__)[0], "cu13", "lib"))' 2> /dev/null || true)
  export LD_LIBRARY_PATH=${packages:+$packages:}${CUDA_HOME:-/usr/local/cuda}/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi

# note NAME JSON: a fact about the machine.
note() {
  printf '{"script":"%s","name":"%s","result":%s}\n' "$script" "$1" "$2" >> "$results"
}

# step NAME SECONDS COMMAND...: runs a command. The last line of its output that is a JSON object becomes its result.
# Returns the exit code of the command; 124 means that it ran into the limit. Tests of which none ran are a failure.
step() {
  local name=$1 most=$(($2 * ${KIT_SLOW:-1})) rc=0 start left line output
  shift 2
  output=$(mktemp "$OUT/.step.XXXXXX")
  left=$((limit - SECONDS))
  if [ "$left" -lt 5 ]; then
    printf '{"script":"%s","name":"%s","rc":null,"seconds":0,"result":null}\n' "$script" "$name" >> "$results"
    echo "LEFT OUT  $name: no time left"
    rm -f "$output"
    return 1
  fi
  [ "$most" -le "$left" ] || most=$left
  start=$(date +%s.%N)
  timeout --kill-after=5 "$most" "$@" > "$output" 2>&1 || rc=$?
  line=$(python3 - "$script" "$name" "$rc" "$start" "$output" <<'PY'
import json, re, sys, time
script, name, rc, start, path = sys.argv[1:]
rc = int(rc)
text = open(path, errors="replace").read()
result = None
for line in reversed(text.splitlines()):
    if line.startswith("{"):
        try:
            result = json.loads(line)
            break
        except ValueError:
            pass
counts = re.findall(r"test result: \w+\. (\d+) passed; (\d+) failed", text)
if counts:
    result = {"passed": sum(int(p) for p, _ in counts), "failed": sum(int(f) for _, f in counts),
              "names": re.findall(r"^test (\S+) \.\.\. FAILED", text, re.M)}
    if result["passed"] == 0:
        rc = rc or 1
    runs = re.findall(r"failed runs: (\[.*?\])", text)
    if runs:
        result["runs"] = runs
print(json.dumps({"script": script, "name": name, "rc": rc, "seconds": round(time.time() - float(start), 2),
                  "result": result}))
sys.exit(rc)
PY
  ) || rc=$?
  # Steps may run side by side.
  { flock 9; echo "=== $name (rc $rc): $*"; cat "$output"; } >> "$log" 9>> "$log.lock"
  echo "$line" | tee -a "$results"
  if [ "$rc" -ne 0 ]; then tail -n "${KIT_TAIL:-12}" "$output" | cut -c 1-300; fi
  rm -f "$output"
  return "$rc"
}

# side_by_side LIMIT: returns as soon as fewer than LIMIT background steps run.
side_by_side() {
  while [ "$(jobs -rp | wc -l)" -ge "$1" ]; do wait -n || true; done
}

# stop REASON: ends the script where the rest would mean nothing.
stop() {
  note stopped "\"$1\""
  echo "STOPPED: $1"
  exit 1
}

note machine "$(python3 - <<'PY'
import datetime, json, os, platform, subprocess
def out(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except OSError:
        return ""
gpu = out("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
commit = open(".gpu/commit").read().strip() if os.path.exists(".gpu/commit") else out("git", "rev-parse", "HEAD")
cpu = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), platform.processor())
print(json.dumps({"gpu": gpu, "cpu": cpu, "cores": os.cpu_count(), "commit": commit,
                  "date": datetime.date.today().isoformat(),
                  "settings": {k: v for k, v in sorted(os.environ.items())
                               if k == "FT_GPU_RUNS" or k.startswith("KIT_") and k != "KIT_BIN"}}))
PY
)"
