#!/usr/bin/env bash
# Runs a command of MPI on two "hosts" of this machine: two network namespaces with a shaped link between them, ranks over
# TCP. Needs root, iproute2 (`ip`, `tc`) and Open MPI.
#
#   tools/two-hosts.sh RATE RANKS_PER_HOST COMMAND...
#   tools/two-hosts.sh 1gbit 1 target/release/ft train --recipe my.toml
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,7p' "$0" >&2; exit 2; }
rate=$1 each=$2
shift 2
a=ft-a-$$ b=ft-b-$$
agent=$(mktemp)
ended() {
  ip netns del "$a" 2> /dev/null || true
  ip netns del "$b" 2> /dev/null || true
  rm -f "$agent"
}
trap ended EXIT
ip netns add "$a"
ip netns add "$b"
ip link add ft0 netns "$a" type veth peer name ft0 netns "$b"
for side in "$a 10.77.0.1" "$b 10.77.0.2"; do
  read -r space address <<< "$side"
  ip -n "$space" addr add "$address/24" dev ft0
  ip -n "$space" link set lo up
  ip -n "$space" link set ft0 up
  if ! ip netns exec "$space" tc qdisc add dev ft0 root tbf rate "$rate" burst 256k latency 50ms; then
    echo "the kernel has no token bucket filter: the link is not shaped" >&2
  fi
done
# In the place of ssh: Open MPI starts its daemon on the other host with it.
cat > "$agent" << AGENT
#!/bin/sh
shift
exec ip netns exec $b unshare --uts sh -c "hostname ft-b; \$*"
AGENT
chmod +x "$agent"
ip netns exec "$a" unshare --uts sh -c 'hostname ft-a; exec "$@"' sh \
  env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1 \
  mpirun --mca plm rsh --mca plm_rsh_agent "$agent" --mca plm_rsh_no_tree_spawn 1 --mca btl self,tcp \
  --mca btl_tcp_if_include ft0 --mca oob_tcp_if_include ft0 --oversubscribe --bind-to none \
  -H "10.77.0.1:$each,10.77.0.2:$each" "$@"
