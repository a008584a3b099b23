#!/usr/bin/env bash
# Lays out the root directory of the image in $1 from the tarball that scripts/dist.sh made: /opt/spmmd, glibc, a user, a configuration.
# Runs inside the build stages of docker/Dockerfile.
set -euo pipefail
cd "$(dirname "$0")/.."

root=$1
tarballs=(dist/spmmd-*.tar.gz)
[ "${#tarballs[@]}" -eq 1 ] || { echo "make_root: one tarball expected in dist/: ${tarballs[*]}" >&2; exit 1; }

# 65532 may write to the cache folder and /tmp, so that a plain `docker run` works; with a read-only root both are mounts.
install -d "$root"/{opt/spmmd,etc/spmmd,models,proc,sys,dev}
install -d -o 65532 -g 65532 "$root/var/cache/spmmd"
install -d -m 1777 "$root/tmp"
tar -C "$root/opt/spmmd" --strip-components=1 -xzf "${tarballs[0]}"

# glibc stays what the programs were linked with: the loader's path is fixed, and the rest lies beside it.
for library in ld-linux-x86-64.so.2 libc.so.6 libm.so.6 libmvec.so.1 libpthread.so.0 libdl.so.2 librt.so.1 libresolv.so.2; do
  for folder in /lib64 /lib/x86_64-linux-gnu; do
    if [ -e "$folder/$library" ]; then install -D "$(readlink -f "$folder/$library")" "$root$folder/$library"; break; fi
  done
done

printf 'root:x:0:0:root:/:/nologin\nspmmd:x:65532:65532:spmmd:/:/nologin\n' >"$root/etc/passwd"
printf 'root:x:0:\nspmmd:x:65532:\n' >"$root/etc/group"
printf 'hosts: files dns\n' >"$root/etc/nsswitch.conf"
# The NVIDIA container toolkit reads it to find out where this root keeps its libraries.
cp /etc/debian_version "$root/etc/debian_version"
cp docker/spmmd.textproto "$root/etc/spmmd/spmmd.textproto"
