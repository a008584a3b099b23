#!/usr/bin/env bash
# Builds the image with buildah, without a container engine or an image registry, and runs it: as uid 65532, in a read-only root, with nothing but
# what the image holds. As root on Debian 12, with buildah and debootstrap installed.
#
#   scripts/image_check.sh [cpu|cuda]
#
# The base of the build stages is a stand-in: Debian 12 by debootstrap from this machine's package mirror, under the name that the
# Dockerfile asks for. Sources are those of HEAD. WORK (default /tmp/spmmd-image) keeps the base and the layers for the next time.
set -euo pipefail
cd "$(dirname "$0")/.."

# Mounts of this script are its own and go with it.
if [ "${SPMMD_IMAGE_CHECK:-}" != inside ]; then SPMMD_IMAGE_CHECK=inside exec unshare --mount "$PWD/scripts/image_check.sh" "$@"; fi

target=${1:-cpu}
work=${WORK:-/tmp/spmmd-image}
base=docker.io/library/debian:bookworm-slim
image="localhost/spmmd:check-$target"
store() { buildah --storage-driver overlay --root "$work/store" --runroot "$work/run" "$@"; }

mkdir -p "$work"
if ! store inspect --type image "$base" >/dev/null 2>&1; then
  if [ ! -d "$work/rootfs/etc" ]; then
    # shellcheck disable=SC2016  # apt's own placeholder
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | head -n 1)
    debootstrap --variant=minbase bookworm "$work/rootfs" "$mirror" >"$work/debootstrap.log"
    cp /etc/apt/sources.list.d/*.sources "$work/rootfs/etc/apt/sources.list.d/" 2>/dev/null || true
  fi
  tar -C "$work/rootfs" -cf "$work/rootfs.tar" .
  printf 'FROM scratch\nADD rootfs.tar /\n' >"$work/Dockerfile.base"
  store bud --isolation chroot --pull-never -f "$work/Dockerfile.base" -t "$base" "$work" >/dev/null
  rm -f "$work/rootfs.tar"
fi

context=$(mktemp -d "$work/context.XXXXXX")
container=
server=
cleanup() {
  if [ -n "$server" ]; then
    kill "$server" 2>/dev/null || true
    wait "$server" || true
  fi
  if [ -n "$container" ]; then store rm "$container" >/dev/null || true; fi
  rm -rf "$context"
}
trap cleanup EXIT
git archive HEAD | tar -x -C "$context"
revision=$(git rev-parse --short HEAD)
# pip in the build stage trusts whom this machine trusts; packages may add certificates of their own meanwhile.
trust=(-v /etc/ssl/certs:/etc/ssl/certs:O)
if [ -e /etc/pip.conf ]; then trust+=(-v /etc/pip.conf:/etc/pip.conf:ro); fi
store bud "${trust[@]}" --layers --format docker --isolation chroot --pull-never -f "$context/docker/Dockerfile" --target "$target" \
  --build-arg "REVISION=$revision" -t "$image" "$context" >"$work/build.log" 2>&1 || { tail -n 30 "$work/build.log"; exit 1; }

container=$(store from --pull-never "$image")
root=$(store mount "$container")
echo "image: $(du -sm "$root" | cut -f1) MB, $(find "$root" -type f | wc -l) files; shells: $(find "$root" -name '*sh' -type f -perm /111 | wc -l)"
store inspect --type image --format 'image: user {{.Docker.Config.User}}, entrypoint {{.Docker.Config.Entrypoint}}, command {{.Docker.Config.Cmd}}, health check {{.Docker.Config.Healthcheck.Test}}{{println}}' "$image"

# The root as a container engine would give it: read-only, /tmp in memory, uid 65532.
mkdir -p "$work/view"
mount --bind "$root" "$work/view"
mount -o remount,bind,ro "$work/view"
mount --bind /proc "$work/view/proc"  # the loader finds $ORIGIN through it
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$work/view/tmp"
in_image() { chroot --userspec=65532:65532 --groups= "$work/view" "$@"; }
install -m 644 tests/data/minilm-block0/block.safetensors "$work/view/tmp/"
in_image /opt/spmmd/bin/spmmd --version
chroot --userspec=65532:65532 --groups= "$work/view" /opt/spmmd/bin/spmmd --config=/etc/spmmd/spmmd.textproto \
  >"$work/ready" 2>"$work/server.log" &
server=$!
for _ in $(seq 100); do
  if [ -s "$work/ready" ]; then break; fi
  sleep 0.1
done
grep '^spmmd ready' "$work/ready" || { cat "$work/server.log" >&2; exit 1; }
echo "health check: $(in_image /opt/spmmd/bin/spmmd --health-check=127.0.0.1:8501)"
in_image /opt/spmmd/bin/spmmctl --server=127.0.0.1:8500 register q --file /tmp/block.safetensors:q.weight --prune magnitude:0.5
in_image /opt/spmmd/bin/spmmctl --server=127.0.0.1:8500 run q --input /tmp/block.safetensors:qkv.input --output /tmp/y.npy
[ -s "$work/view/tmp/y.npy" ] || { echo "no output" >&2; exit 1; }
echo "uid of the process: $(awk '/^Uid:/ {print $2}' "/proc/$server/status")"
kill -TERM "$server"
wait "$server"
server=
echo "SIGTERM: exit code 0"
