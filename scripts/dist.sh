#!/usr/bin/env bash
# Makes dist/spmmd-VERSION-x86_64-linux.tar.gz: the programs, every shared library they need but glibc's and CUDA's, and
# the licences of those libraries. Then proves that it stands alone: it is unpacked, must find all its libraries inside
# itself, and serves a layer in an empty root directory that holds nothing but glibc.
#
#   scripts/dist.sh [--build-dir DIR]    (default: build; `make dist` builds it first)
set -euo pipefail
cd "$(dirname "$0")/.."

build=build
if [ "${1:-}" = "--build-dir" ] && [ "$#" -eq 2 ]; then
  build=$2
elif [ "$#" -gt 0 ]; then
  echo "usage: scripts/dist.sh [--build-dir DIR]" >&2
  exit 2
fi

readonly limit_bytes=$((64 * 1000 * 1000))
# Part of every host: glibc itself, and the driver and toolkit where there is a GPU.
readonly host_libraries='^(ld-linux.*|libc|libm|libmvec|libpthread|libdl|librt|libresolv|libutil|libanl|libnss_.*)\.so'
readonly cuda_libraries='^lib(cuda|cudart|cublas|cublasLt|cusparse|cupti|nvrtc|nvJitLink|nccl|nvidia-.*)\.so'
# Compiled into the programs from headers or static archives: no shared library of theirs shows up.
readonly compiled_in=(libcli11-dev nlohmann-json3-dev libhwy-dev)

fail() {
  echo "dist: $*" >&2
  exit 1
}

[ "$(uname -m)" = x86_64 ] || fail "the tarball is for x86_64, this is $(uname -m)"
for program in spmmd spmmctl; do
  [ -x "$build/bin/$program" ] || fail "$build/bin/$program is missing: build it first"
done
version=$("$build/bin/spmmctl" --version)
version=${version##* }
name="spmmd-$version-x86_64-linux"
work=$(mktemp -d)
server_pid=
cleanup() {
  [ -z "$server_pid" ] || kill "$server_pid" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT

# --- Collect.

stage="$work/$name"
mkdir -p "$stage/bin" "$stage/lib" "$stage/licenses"
for program in spmmd spmmctl spmm_bench; do
  if [ -x "$build/bin/$program" ]; then install -m 755 "$build/bin/$program" "$stage/bin/"; fi
done
if [ -e "$build/lib/libspmmd_cuda.so" ]; then install -m 644 "$build/lib/libspmmd_cuda.so" "$stage/lib/"; fi

# "NAME PATH" of every shared library that the given files need.
needed() { ldd "$@" | awk '$2 == "=>" && $3 == "not" {print $1, "MISSING"} $2 == "=>" && $3 ~ /^\// {print $1, $3}' | sort -u; }

licence_of() { # PACKAGE
  local copyright="/usr/share/doc/$1/copyright"
  [ -e "$copyright" ] || fail "no licence text of package $1 ($copyright)"
  cp -L "$copyright" "$stage/licenses/$1.txt"
}

while read -r soname path; do
  if [[ $soname =~ $host_libraries || $soname =~ $cuda_libraries ]]; then continue; fi
  [ "$path" != MISSING ] || fail "library $soname is not on this machine"
  if [ -e "$stage/lib/$soname" ]; then continue; fi
  real=$(readlink -f "$path")
  install -m 644 "$real" "$stage/lib/$soname"
  # dpkg knows a file by its path before or after the merge of /lib into /usr/lib.
  package=$(dpkg-query -S "$real" "${real#/usr}" 2>/dev/null | head -n 1 | cut -d: -f1) || true
  [ -n "$package" ] || fail "no package owns $real: its licence is unknown"
  licence_of "$package"
done < <(needed "$stage"/bin/* "$stage"/lib/*.so* 2>/dev/null)
for package in "${compiled_in[@]}"; do licence_of "$package"; done
cp LICENSE "$stage/LICENSE"
for document in README.md CHANGELOG.md; do
  if [ -e "$document" ]; then cp "$document" "$stage/"; fi
done

# DT_RPATH, not DT_RUNPATH: the bundled libraries go before LD_LIBRARY_PATH, which a GPU host sets for CUDA.
# shellcheck disable=SC2016  # $ORIGIN is the loader's to expand
for file in "$stage"/bin/*; do
  strip --strip-unneeded "$file"
  patchelf --force-rpath --set-rpath '$ORIGIN/../lib' "$file"
done
# shellcheck disable=SC2016
for file in "$stage"/lib/*; do
  strip --strip-unneeded "$file"
  patchelf --force-rpath --set-rpath '$ORIGIN' "$file"
done

mkdir -p dist
tarball="dist/$name.tar.gz"
# The same sources give the same bytes.
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$epoch" -cf - "$name" | gzip -9n >"$tarball"
(cd dist && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
bytes=$(stat -c %s "$tarball")
[ "$bytes" -lt "$limit_bytes" ] || fail "$tarball has $bytes bytes, more than $limit_bytes"

# --- Prove.

root="$work/root"
mkdir -p "$root/opt" "$root/tmp"
tar -C "$root/opt" -xzf "$tarball"
unpacked="$root/opt/$name"
while read -r soname path; do
  if [[ $soname =~ $host_libraries || $soname =~ $cuda_libraries ]]; then continue; fi
  case "$(readlink -f "$path")" in
    "$(readlink -f "$unpacked")"/lib/*) ;;
    *) fail "$soname is taken from $path, outside the tarball" ;;
  esac
done < <(env -i PATH="$PATH" ldd "$unpacked"/bin/* "$unpacked"/lib/* | awk '$2 == "=>" {print $1, $3}' | sort -u)

# An empty root with glibc alone shows what a missing library or file would do, if this user may make one. The loader
# finds $ORIGIN through /proc.
mkdir "$root/proc"
export PATH="$PATH:/usr/sbin:/sbin"
in_root=(unshare --mount)
if [ "$(id -u)" -ne 0 ]; then in_root+=(--map-root-user); fi
# shellcheck disable=SC2016  # for the inner shell to expand
in_root+=(sh -c 'mount --rbind /proc "$0/proc" && exec env -i "$(command -v chroot)" "$0" "$@"' "$root")
for library in ld-linux-x86-64.so.2 libc.so.6 libm.so.6 libmvec.so.1 libpthread.so.0 libdl.so.2 librt.so.1 libresolv.so.2; do
  for folder in /lib64 /lib/x86_64-linux-gnu /usr/lib64; do
    if [ -e "$folder/$library" ]; then install -D "$(readlink -f "$folder/$library")" "$root$folder/$library"; break; fi
  done
done
prefix="/opt/$name"
where="an empty root directory"
if ! "${in_root[@]}" "$prefix/bin/spmmctl" --version >/dev/null 2>"$work/chroot.log"; then
  if "${in_root[@]}" /lib64/ld-linux-x86-64.so.2 --version >/dev/null 2>&1; then
    fail "the programs do not start in an empty root: $(cat "$work/chroot.log")"
  fi
  in_root=(env -i)
  prefix=$unpacked
  where="an empty environment (no right to chroot here)"
fi
alone() { "${in_root[@]}" "$@"; }

tmp=${prefix%/opt/*}/tmp
socket="unix:$tmp/s"
cp tests/data/minilm-block0/block.safetensors "$root/tmp/block.safetensors"
"${in_root[@]}" "$prefix/bin/spmmd" --listen="$socket" --metrics-listen=127.0.0.1:0 --backend=cpu \
  >"$work/ready" 2>"$work/spmmd.log" &
server_pid=$!
alone "$prefix/bin/spmmctl" --server="$socket" status --wait 30 >"$work/status" || fail "$(cat "$work/spmmd.log")"
alone "$prefix/bin/spmmctl" --server="$socket" register q --file "$tmp/block.safetensors:q.weight" --prune magnitude:0.5
alone "$prefix/bin/spmmctl" --server="$socket" run q --input "$tmp/block.safetensors:qkv.input" --output "$tmp/y.npy"
[ -s "$root/tmp/y.npy" ] || fail "no output was written"
kill -TERM "$server_pid"
wait "$server_pid" || fail "spmmd did not end well after SIGTERM: $(cat "$work/spmmd.log")"
server_pid=
if [ -x "$unpacked/bin/spmm_bench" ]; then alone "$prefix/bin/spmm_bench" --help >/dev/null; fi

# --- Report.

newest_symbol() { objdump -T "${@:2}" 2>/dev/null | grep -o "$1_[0-9.]*" | sort -uV | tail -n 1 | cut -d_ -f2; }
mapfile -t without_runtime < <(find "$unpacked/bin" "$unpacked/lib" -type f ! -name 'libstdc++.so.*' ! -name 'libgcc_s.so.*')
echo "dist: $tarball, $((bytes / 1000000)) MB, $(find "$unpacked/lib" -type f | wc -l) libraries; tested in $where"
echo "dist: needs x86-64 Linux with glibc $(newest_symbol GLIBC "$unpacked"/bin/* "$unpacked"/lib/*) or newer;" \
  "with lib/libstdc++.so.6 and lib/libgcc_s.so.1 deleted, glibc $(newest_symbol GLIBC "${without_runtime[@]}")" \
  "and a libstdc++ that has GLIBCXX_$(newest_symbol GLIBCXX "${without_runtime[@]}")"
if [ -e "$unpacked/lib/libspmmd_cuda.so" ]; then echo "dist: GPUs need the host's NVIDIA driver and CUDA libraries"; fi
