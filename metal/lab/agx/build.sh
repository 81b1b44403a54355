#!/bin/bash
# build.sh FOLDER: builds Mesa's compiler for Apple GPUs and leaves it in FOLDER, as `asahi_clc`, with a file `versions`.
#
# For Debian 12 and 13: Debian's clang and SPIR-V translator, Mesa's source from the Debian mirror that this machine
# uses, and on Debian 12, whose meson is too old, meson from the Python package index. Packages are installed as root;
# where all of them are there already, anybody can build. About 400 compiler runs and 1 GB, given back at the end.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:?usage: build.sh FOLDER}
mesa=25.0.7 suite=trixie

say() { echo "agx: $*" >&2; }
distribution=$( (. /etc/os-release && echo "${ID:-}-${VERSION_ID:-}") 2>/dev/null || echo unknown)
case $distribution in
debian-12) llvm=15 meson=python3-venv ;;
debian-13) llvm=19 meson=meson ;;
*)
  say "this builds on Debian 12 and 13, and this is $distribution. Elsewhere, run it in a container of one of them. What it"
  say "needs: clang, LLVM, libclc and the SPIR-V translator (library and llvm-spirv), all of LLVM 15 or 19; a C compiler,"
  say "bison, flex, libdrm, libelf, zlib, expat; and Mesa $mesa's source, changed by edits.py."
  exit 2
  ;;
esac

packages=(
  "clang-$llvm" "llvm-$llvm-dev" "libclang-$llvm-dev" "libclang-cpp$llvm-dev" "libclc-$llvm-dev"
  "libllvmspirvlib-$llvm-dev" "llvm-spirv-$llvm" gcc g++ bison flex ninja-build pkg-config xz-utils "$meson"
  python3-mako python3-yaml python3-packaging spirv-tools zlib1g-dev libexpat1-dev libdrm-dev libelf-dev ca-certificates
)
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ]; then
    say "these packages are missing, and only root can install them: apt-get install ${missing[*]}"
    exit 2
  fi
  say "installing ${#missing[@]} packages"
  apt-get -qq update
  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null
fi

mkdir -p "$folder"
work=$(mktemp -d "$folder/build.XXXXXX")
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # apt downloads as a user of its own
cd "$work"

# Mesa's source, by apt in a configuration of its own that knows only the sources of one suite on this machine's mirror.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' 'Component: main' | head -1)
if [ -z "$mirror" ]; then
  say "apt knows no Debian mirror here: run 'apt-get update' once, as root"
  exit 2
fi
say "fetching Mesa $mesa"
mkdir -p apt/lists/partial apt/cache/archives/partial
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >apt/list
cat >apt/conf <<END
Dir::Etc::sourcelist "$work/apt/list";
Dir::Etc::sourceparts "/dev/null";
Dir::State::lists "$work/apt/lists";
Dir::Cache "$work/apt/cache";
APT::Sandbox::User "";
END
export APT_CONFIG=$work/apt/conf
apt-get -qq update
version=$(apt-cache showsrc --only-source mesa | sed -n 's/^Version: //p' | grep -m 1 "^$mesa-" || true)
if [ -z "$version" ]; then
  say "$suite on $mirror has no Mesa $mesa any more"
  exit 2
fi
apt-get -qq source --download-only "mesa=$version" >/dev/null
unset APT_CONFIG
mkdir source
tar xf "mesa_$mesa.orig.tar.xz" -C source --strip-components=1
/usr/bin/python3 "$here/edits.py" source

say "building with LLVM $llvm"
if [ "$meson" != meson ]; then
  /usr/bin/python3 -m venv --system-site-packages venv
  venv/bin/pip -q --disable-pip-version-check install 'meson>=1.4,<2'
fi
echo "[binaries]" >native
echo "llvm-config = '/usr/bin/llvm-config-$llvm'" >>native
export PATH=$work/venv/bin:/usr/bin:/bin:$PATH
disabled=()
for part in glx egl gbm gles1 gles2 zstd xmlconfig valgrind libunwind lmsensors; do disabled+=("-D$part=disabled"); done
meson setup build source --native-file native -Dtools=asahi -Dvulkan-drivers=asahi -Dgallium-drivers= -Dplatforms= \
  "${disabled[@]}" -Dopengl=false -Dmesa-clc=enabled -Dprecomp-compiler=enabled -Dllvm=enabled \
  -Dshared-llvm=enabled -Dbuild-tests=false -Dvideo-codecs= -Dbuildtype=release -Doptimization=0 -Db_ndebug=false \
  >meson.log || { tail -n 20 meson.log >&2; exit 1; }
nice -n 10 ninja -C build src/asahi/clc/asahi_clc >ninja.log || { tail -n 30 ninja.log >&2; exit 1; }

strip -o "$folder/asahi_clc.new" build/src/asahi/clc/asahi_clc
mv "$folder/asahi_clc.new" "$folder/asahi_clc"
printf 'mesa=%s\nllvm=%s\nspirv=%s\n' "$version" "$llvm" \
  "$(dpkg-query -W -f '${Version}' "llvm-spirv-$llvm")" >"$folder/versions"
say "built $folder/asahi_clc"
