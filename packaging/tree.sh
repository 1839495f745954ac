#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# tree.sh DEST [gpuwarden|gpuwarden-sim|fleet]: makes under DEST exactly the files that the package of that name installs. The
# .deb and the container image are both made from it. The same sources and packages give the same bytes. `fleet` is no
# package: what the image of the fleet's service has beyond the agent's.
#
# The agent gets a Python environment of its own in /usr/lib/gpuwarden, without pip: on the system's /usr/bin/python3, or,
# with RUNTIME=ROOT (the root of packaging/runtime.sh), on a Python that comes along, with the libraries below it. What it depends on is there as bytecode without its source (that halves it); our own code has both. No module is left to be
# compiled at run time: what root imports would write files that no package owns.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "tree: $*" >&2; exit 1; }
[ $# -ge 1 ] || die "usage: $0 DEST [gpuwarden|gpuwarden-sim|fleet]"
mkdir -p "$1"
dest=$(cd "$1" && pwd)
[ -z "$(ls -A "$dest")" ] || die "$dest is not empty: remove it first"

python_version=3.11 # of /usr/bin/python3 where it runs, and of packaging/runtime.sh
runtime=${RUNTIME:-}
python=${PYTHON:-.venv/bin/python}
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y pyproject.toml)}"
export SOURCE_DATE_EPOCH PYTHONHASHSEED=0
home=usr/lib/gpuwarden
packages=$home/lib/python$python_version/site-packages

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The bytecode of folders under DEST: files as they will be called where it is installed, valid whatever their times are.
compile() { # $1: invalidation mode, then options and folders
	local mode=$1
	shift
	"$python" -c 'import sys; sys.exit(sys.version_info[:2] != tuple(map(int, sys.argv[1].split("."))))' "$python_version" ||
		die "$python is not Python $python_version, whose bytecode is wanted: set PYTHON"
	"$python" -m compileall -q -j1 --invalidation-mode "$mode" -s "$dest" -p / "$@"
}

pip_install() { # $1: where to; $2: the project
	"$python" -m pip install --quiet --quiet --disable-pip-version-check --no-deps --no-compile --target "$1" "$2"
}

install_python_packages() {
	mkdir -p "$work/source" "$dest/$packages"
	"$python" -m tools.shipping.closure "$dest/$packages" || die "run \`make setup\` first"
	[ -z "$runtime" ] || replace_new_wheels
	cp -a --parents pyproject.toml README.md LICENSE LICENSES bpf/LICENSES packaging/licences agent enforce gpuwarden "$work/source"
	pip_install "$work/ours" "$work/source"
	rm -rf "$work/ours/bin"
	mv "$work/ours"/* "$dest/$packages"
	find "$dest/$packages" -name __pycache__ -prune -exec rm -rf {} +
}

# Of a wheel that was compiled for a newer glibc than the runtime, the same version's wheel for older ones.
replace_new_wheels() {
	local wheel what machine tag
	local older=()
	machine=$(uname -m)
	for tag in manylinux_2_31 manylinux_2_28 manylinux_2_17 manylinux2014; do older+=(--platform "${tag}_$machine"); done
	for wheel in "$dest/$packages"/*.dist-info/WHEEL; do
		if ! grep '^Tag: .*manylinux' "$wheel" | grep -qvE 'manylinux_2_(3[2-9]|[4-9][0-9])_'; then
			grep -q '^Tag: .*manylinux' "$wheel" || continue
			what=$(basename "$(dirname "$wheel")" .dist-info)
			cut -d, -f1 "$(dirname "$wheel")/RECORD" | grep -v '^\.\.' | (cd "$dest/$packages" && xargs -d '\n' rm -f)
			"$python" -m pip install --quiet --quiet --disable-pip-version-check --no-deps --no-compile --only-binary :all: \
				--python-version "$python_version" "${older[@]}" --target "$work/older" "${what%-*}==${what##*-}"
			cp -a "$work/older/." "$dest/$packages"
		fi
	done
}

# What the package says that it depends on is all that it needs: packaging/deb/control, packaging/rpm/gpuwarden.spec.
check_needed() {
	local known='^(lib(c|m|dl|rt|util|pthread|gcc_s|stdc\+\+|elf|z)|ld-linux-.*|lib(bpf|crypto|cuda|ffi|sqlite3|ssl))\.so\.[0-9]+$' file needed
	while IFS= read -r -d '' file; do
		needed=$(objdump -p "$file" 2>/dev/null) || continue
		! awk '$1 == "NEEDED" { print $2 }' <<<"$needed" | grep -vE "$known" || die "${file#"$dest"} needs that library"
		! grep -oE 'GLIBC_2\.[0-9]+' <<<"$needed" | sort -Vu | awk -F. '$2 > 31' | grep . || die "${file#"$dest"} needs that glibc"
	done < <(find "$dest" -type f \( -name '*.so*' -o -path '*/bin/*' \) -print0)
}

# Only what nothing of ours, and nothing that ours calls, can import. tests/contract/packaging/test_installed_tree.py imports the rest.
trim_python_packages() (
	cd "$dest/$packages"
	# Policies are read by PyYAML's own parser, not libyaml.
	rm -rf google/protobuf/{compiler,testdata,testing} _yaml yaml/_yaml.*.so
	rm -rf pydantic/v1 pydantic/mypy.py psutil/_ps{aix,bsd,osx,sunos,windows}.py pygments/{cmdline,sphinxext}.py example.py
	rm -rf textual/{demo,document,tree-sitter} textual/{_markup_playground,_text_area_theme}.py textual/widgets/{,_}{data_table,text_area}.py
	# 240 languages to colour, 49 ways to: tracebacks need one. No other language is listed, so none is looked for.
	find pygments/lexers -name '*.py' ! -name __init__.py ! -name _mapping.py ! -name python.py ! -name special.py -delete
	find pygments/{formatters,styles} -name '*.py' ! -name __init__.py ! -name _mapping.py ! -name default.py ! -name monokai.py -delete
	echo 'LEXERS = {name: lexer for name, lexer in LEXERS.items() if lexer[0] in ("pygments.lexers.python", "pygments.lexers.special")}' \
		>>pygments/lexers/_mapping.py
	find . \( -name '*.pyi' -o -name py.typed -o -name '*.pyx' -o -name '*.pxd' -o -name '*.pxi' -o -name '*.proto' -o -name '*.[ch]' \) -delete
	# Of a distribution's description stay its metadata without the prose, licences, and lists of what is compiled in.
	find . -path '*.dist-info/*' -type f ! -path '*/licenses/*' ! -path '*/sboms/*' ! -name METADATA \
		! -iname 'licen[sc]e*' ! -iname 'notice*' -delete
	{ grep -rlZ --include='*.json' '"components": \[\]' . || true; } | xargs -0r rm # there may be none
	find . -type d -empty -delete
	sed -i '/^\r\{0,1\}$/,$d' ./*.dist-info/METADATA
	find . -name '*.so*' -type f -exec strip --strip-unneeded {} +
)

compile_python_packages() {
	local theirs=()
	for path in "$dest/$packages"/*; do
		case "${path##*/}" in
		agent | enforce | gpuwarden) compile checked-hash "$path" ;;
		*.dist-info) ;;
		*) theirs+=("$path") ;;
		esac
	done
	compile unchecked-hash -o 2 -b "${theirs[@]}" # without docstrings
	find "${theirs[@]}" -name '*.py' -delete
}

# Python's own library is bytecode without its source, too. What is left out nothing of ours imports, nor what ours calls.
install_runtime() {
	local library=$dest/$home/python/lib/python$python_version
	mkdir -p "$dest/$home"
	cp -a "$runtime/$home/python" "$dest/$home"
	rm -rf "$library"/{__phello__,config-*,ensurepip,idlelib,lib2to3,pydoc_data,test,tkinter,turtle*,site-packages,dist-packages}
	rm -f "$library"/lib-dynload/{*_failed,_codecs_*,_crypt.*,audioop.*,nis.*,ossaudiodev.*,spwd.*,xxlimited*}.so "$dest/$home"/python/lib/*.so
	find "$dest/$home/python" \( -name '*.so*' -o -name "python$python_version" \) -type f -exec chmod u+w {} + -exec strip --strip-unneeded {} +
	find "$library" -name __pycache__ -prune -exec rm -rf {} +
	compile unchecked-hash -o 2 -b "$library"
	find "$library" -name '*.py' -delete
}

make_environment() {
	local interpreter=/usr/bin/python3
	mkdir -p "$dest/$home/bin" "$dest/usr/bin"
	if [ -n "$runtime" ]; then
		install_runtime
		interpreter=/$home/python/bin/python$python_version
	fi
	ln -s "$interpreter" "$dest/$home/bin/python3"
	printf 'home = %s\ninclude-system-site-packages = false\nversion = %s\n' "${interpreter%/*}" "$python_version" >"$dest/$home/pyvenv.cfg"
	for command in gpuwarden:main gputop:gputop; do
		# -I: neither the working directory nor the caller's environment says what root runs. A process that is spawned by
		# Python's multiprocessing, as the fleet's service does, reads this file again: it must not be another such command.
		printf '#!/%s/bin/python3 -I\nfrom gpuwarden.main import %s\n\nif __name__ == "__main__":\n    %s()\n' \
			"$home" "${command#*:}" "${command#*:}" \
			>"$dest/$home/bin/${command%:*}"
		chmod 755 "$dest/$home/bin/${command%:*}"
		ln -s "../lib/gpuwarden/bin/${command%:*}" "$dest/usr/bin/${command%:*}"
	done
}

make_agent() {
	[ -e bpf/build/gpuwarden.bpf.o ] || die "no BPF programs: run \`make setup\` first"
	install_python_packages
	trim_python_packages
	compile_python_packages
	make_environment
	install -m 644 -t "$dest/$home" bpf/build/*.bpf.o
	install -Dm 644 -t "$dest/usr/lib/systemd/system" packaging/systemd/gpuwarden.service
	install -Dm 644 packaging/systemd/tmpfiles.conf "$dest/usr/lib/tmpfiles.d/gpuwarden.conf"
	install -Dm 644 packaging/systemd/sysusers.conf "$dest/usr/lib/sysusers.d/gpuwarden.conf"
	install -Dm 644 -t "$dest/etc/gpuwarden" packaging/policy.yaml
	install -Dm 644 -t "$dest/usr/share/man/man8" packaging/man/gpuwarden.8
	install -Dm 644 -t "$dest/usr/share/man/man1" packaging/man/gputop.1
	gzip -9n "$dest"/usr/share/man/man?/*
	install -Dm 644 -t "$dest/usr/share/bash-completion/completions" packaging/completions/bash/*
	install -Dm 644 -t "$dest/usr/share/zsh/vendor-completions" packaging/completions/zsh/*
	install -Dm 644 -t "$dest/usr/share/fish/vendor_completions.d" packaging/completions/fish/*
	describe_parts
}

# What comes along with the own Python is described as the Debian packages that its sources are of.
describe_parts() {
	mkdir -p "$dest/usr/share/doc/gpuwarden"
	mkdir "$work/licences"
	[ -z "$runtime" ] || cp -a "$runtime/parts/." "$dest"
	"$python" -m tools.shipping.sbom "$dest" >"$work/sbom.cdx.json"
	"$python" -m tools.shipping.licences "$dest" "$work/licences"
	[ -z "$runtime" ] || (cd "$runtime/parts" && find . -type f -printf "$dest/%P\\0") | xargs -0r rm
	find "$dest" -type d -empty -delete
	mkdir -p "$dest/usr/share/doc/gpuwarden"
	mv "$work/sbom.cdx.json" "$work/licences" "$dest/usr/share/doc/gpuwarden"
}

# Libraries named as the driver's must not be found by accident: all of it lies in one folder that no linker looks at. The
# agent's environment alone looks for modules and entry points there, by a .pth file.
make_simulated_gpu() {
	local under=$dest/usr/lib/gpuwarden-sim
	local built=${SIMULATOR:-sim/build}
	[ -e "$built/bin/gpusim" ] || die "no simulated GPU: run \`make setup\` first"
	mkdir -p "$work/source" "$dest/$packages"
	cp -a --parents sim/pyproject.toml sim/demo tools/__init__.py tools/harness "$work/source"
	pip_install "$under" "$work/source/sim"
	find "$under" -path '*.dist-info/*' ! -name METADATA ! -name entry_points.txt -delete
	echo /usr/lib/gpuwarden-sim >"$dest/$packages/gpuwarden-sim.pth"
	mkdir -p "$under/sim/build/bin" "$under/sim/build/lib"
	cp "$built"/bin/{gpusim,nvidia-cuda-mps-control,offline,online} "$under/sim/build/bin"
	cp -P "$built"/lib/{libcuda.so,libcuda.so.1,libnvidia-ml.so.1} "$under/sim/build/lib"
	strip --strip-all "$under"/sim/build/bin/*
	strip --strip-unneeded "$under"/sim/build/lib/*.so.1
	compile checked-hash "$under"
}

# The fleet in the agent's own environment, with what it depends on. Not stripped: the libraries in these wheels were moved
# by patchelf, and strip breaks such ones. With docstrings: SciPy makes some out of others.
make_fleet() {
	mkdir -p "$work/source" "$dest/$packages"
	"$python" -m tools.shipping.closure --extra fleet "$dest/$packages" || die "run \`make setup\` first"
	cp -a --parents pyproject.toml README.md LICENSE LICENSES bpf/LICENSES packaging/licences agent enforce fleet gpuwarden "$work/source"
	pip_install "$work/ours" "$work/source"
	(
		cd "$dest/$packages"
		find . -name tests -type d -prune -exec rm -rf {} +
		rm -rf numpy/_core/{include,lib} numpy/random/lib # SciPy imports all else
		find . \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.[ch]' -o -name '*.a' \) -delete
		find . -path '*.dist-info/*' -type f ! -path '*/licenses/*' ! -path '*/sboms/*' ! -name METADATA \
			! -iname 'licen[sc]e*' ! -iname 'notice*' -delete
		find . -type d -empty -delete
		sed -i '/^\r\{0,1\}$/,$d' ./*.dist-info/METADATA
	)
	local theirs
	mapfile -t theirs < <(find "$dest/$packages" -mindepth 1 -maxdepth 1 -type d ! -name '*.dist-info' ! -name '*.libs')
	compile unchecked-hash -b "${theirs[@]}"
	find "${theirs[@]}" -name '*.py' -delete
	mv "$work/ours/fleet" "$dest/$packages"
	find "$dest/$packages/fleet" -name __pycache__ -prune -exec rm -rf {} +
	compile checked-hash "$dest/$packages/fleet"
	local description=("$work"/ours/gpuwarden-*.dist-info) # `gpuwarden fleet` is found by it
	install -Dm 644 -t "$dest/$packages/${description[0]##*/}" "${description[0]}/entry_points.txt"
}

case "${2:-gpuwarden}" in
gpuwarden) make_agent ;;
fleet) make_fleet ;;
gpuwarden-sim) make_simulated_gpu ;;
*) die "no package is called $2" ;;
esac
[ -z "$runtime" ] || check_needed
chmod -R u+rwX,go+rX,go-w "$dest"
find "$dest" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
