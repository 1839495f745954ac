#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# life.sh WORK [SUITE…]: the Debian packages from their build to their purge, in a fresh Debian of each suite (bookworm) and
# under a systemd of its own. A line per step with its seconds; ends at the first that fails. WORK keeps the packages, the
# log and the bare Debian; `rm -rf WORK/debian-SUITE` for a newer one. All mounts live in a mount namespace that ends with
# this script.
set -euo pipefail
cd "$(dirname "$0")/../.."
. packaging/debian-system.sh

[ $# -ge 1 ] || die "usage: $0 WORK [SUITE…]"
work=$1
root=$work/root
log=$work/log
version=$(packaging/version.sh)
earlier=0.0.1
policy=/etc/gpuwarden/policy.yaml

inside() { in_system "$root" "$@"; }
apt() { inside env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@" </dev/null; }
fail() { echo "$*" >&2; exit 1; }
installed() { inside dpkg-query -W -f '${db:Status-Abbrev}' gpuwarden 2>/dev/null; }

# The steps; each is a shell of its own that ends at the first command that fails.
build() { packaging/deb/build.sh "$work/packages"; }
build_an_earlier_version() { packaging/deb/build.sh "$work/earlier" "$earlier"; }

make_a_fresh_debian() {
	[ -e "$work/debian-$suite" ] || make_system "$work/debian-$suite" ca-certificates
	rm -rf "$root"
	cp -a "$work/debian-$suite" "$root"
	borrow_settings "$root"
}

install_what_it_depends_on() {
	local wanted
	wanted=$(for package in "$work"/packages/*.deb; do dpkg-deb --field "$package" Depends; done |
		tr ',' '\n' | sed 's/[(|].*//; s/ //g; /^gpuwarden$/d' | sort -u)
	apt update
	# shellcheck disable=SC2086 # one word each
	apt install --no-install-recommends $wanted
}

# Every file, with what is in it; but for what dpkg and apt keep about any package.
note_files() { # $1: where to
	local ignored='^\./(var/lib/(dpkg|apt)|var/cache/(apt|debconf|ldconfig)|var/log)/|^\./etc/(group|gshadow|passwd|shadow)- '
	(
		cd "$root"
		find . -xdev -printf '%p %y %m %U:%G %l\n'
		find . -xdev -type f -exec sha256sum {} + | awk '{ print $2, $1 }'
		find run tmp -mindepth 1 -printf './%p %y %m %U:%G %l\n'
	) | grep -vE "$ignored" | sort >"$1"
}

install_version() { # $1: the folder of packages; $2: their version
	local files=("$1"/*.deb)
	cp "${files[@]}" "$root/tmp"
	apt install --no-install-recommends "${files[@]/#"$1"//tmp}"
	rm "${files[@]/#"$1"/$root/tmp}"
	[ "$(inside gpuwarden --version)" = "gpuwarden $2" ] || fail "gpuwarden --version says $(inside gpuwarden --version)"
}

look_around() {
	inside gpuwarden check "$policy"
	[ "$(inside dpkg-query -W -f '${Conffiles}' gpuwarden | awk '{ print $1 }')" = "$policy" ] || fail "the policy is no conffile"
	inside getent group gpuwarden
	inside test -d /run/gpuwarden -a -d /var/lib/gpuwarden
	! inside /usr/bin/python3 -c 'import agent' 2>/dev/null || fail "the system's Python sees the agent's packages"
	! inside ldconfig -p | grep -E 'libcuda|libnvidia' || fail "the linker sees the simulated GPU"
	inside sh -c 'mkdir /tmp/decoy && echo "raise SystemExit(99)" >/tmp/decoy/agent.py && cd /tmp/decoy && PYTHONPATH=. gputop --help' >/dev/null
	rm -r "$root/tmp/decoy"
	[ "$(inside dpkg-query -W -f '${Installed-Size}' gpuwarden)" -lt 72000 ] || fail "installed it is 72 MB or more"
	inside dpkg --verify gpuwarden gpuwarden-sim
}

run_the_demo() { inside gpuwarden demo --plain --seconds 8; }

# As if agent, guardian and backstop had been killed while a process was held.
leave_a_throttle() {
	setsid sleep 600 >/dev/null 2>&1 &
	local tgid=$!
	disown
	echo "$tgid" >"$work/throttled"
	until [ "$(cat "/proc/$tgid/comm")" = sleep ]; do sleep 0.02; done
	inside /usr/lib/gpuwarden/bin/python3 -I - "$tgid" <<-'EOF'
		import os, signal, sys, time
		from agent.core.model import ContainerKey
		from agent.node.procfs import Procfs
		from enforce.ledger.entries import LedgerEntry
		from enforce.ledger.ledger import Ledger

		tgid = int(sys.argv[1])
		process, container = Procfs().process_id(tgid), ContainerKey("docker:of-a-dead-agent")
		entry = LedgerEntry.of("pace", process, container, time.time_ns())
		Ledger("/run/gpuwarden/ledger.jsonl").intend(entry)
		os.kill(tgid, signal.SIGSTOP)
	EOF
	until is_throttled; do sleep 0.02; done
}
is_throttled() { grep -q '^State:.T' "/proc/$(cat "$work/throttled")/status"; }

upgrade() {
	echo "# ours" >>"$root$policy"
	leave_a_throttle
	install_version "$work/packages" "$version"
	! is_throttled || fail "what was throttled before the upgrade still is"
	inside gpuwarden release | grep '^0 processes resumed, 0 entries' || fail "the ledger still has entries"
	[ "$(tail -n 1 "$root$policy")" = "# ours" ] || fail "the upgrade has changed the policy"
	kill "$(cat "$work/throttled")"
}

remove() {
	leave_a_throttle
	apt remove gpuwarden gpuwarden-sim
	! is_throttled || fail "what was throttled before the removal still is"
	kill "$(cat "$work/throttled")"
	[ "$(tail -n 1 "$root$policy")" = "# ours" ] || fail "removing has changed the policy"
	for path in /usr/lib/gpuwarden /usr/lib/gpuwarden-sim /usr/bin/gpuwarden; do
		[ ! -e "$root$path" ] || fail "left after removing: $(find "$root$path" | head)"
	done
}

purge() {
	touch "$root/var/lib/gpuwarden/usage.sqlite" "$root/etc/gpuwarden/web.yaml"
	apt purge gpuwarden gpuwarden-sim
	[ -z "$(installed)" ] || fail "dpkg still knows it: $(installed)"
}

compare_files() {
	note_files "$work/after"
	diff "$work/before" "$work/after" || fail "purging has left something"
}

# A container whose first process is systemd, as on a real node but for the GPU. Its cgroups are v2 alone.
systemd() { runc --root "$work/runc" "$@"; }
in_systemd() { systemd exec gpuwarden-deb-life "$@"; }

start_systemd() {
	install_version "$work/earlier" "$earlier"
	mkdir -p "$root/etc/systemd/system/gpuwarden.service.d" "$work/bundle"
	printf '[Service]\nEnvironment=%s %s\n' GPUSIM_DIR=/run/gpusim LD_LIBRARY_PATH=/usr/lib/gpuwarden-sim/sim/build/lib |
		tee "$root/etc/systemd/system/gpuwarden.service.d/simulated.conf" >"$root/etc/systemd/system/gpusim.service"
	printf '%s\n' RuntimeDirectory=gpusim 'ExecStart=/usr/lib/gpuwarden-sim/sim/build/bin/gpusim serve' '[Unit]' \
		Before=gpuwarden.service '[Install]' WantedBy=multi-user.target >>"$root/etc/systemd/system/gpusim.service"
	inside systemctl enable gpusim
	sed "s|@ROOT@|$root|" packaging/deb/systemd.json >"$work/bundle/config.json"
	umount --lazy /sys/fs/cgroup
	mount -t cgroup2 cgroup2 /sys/fs/cgroup
	systemd run --detach --bundle "$work/bundle" gpuwarden-deb-life >"$work/console" 2>&1 </dev/null
	in_systemd timeout 60 sh -c 'until systemctl is-system-running 2>/dev/null | grep -E "running|degraded"; do sleep 0.2; done' ||
		fail "$(in_systemd systemctl list-jobs; cat "$work/console")"
}

look_at_the_service() {
	[ "$(in_systemd systemctl is-enabled gpuwarden)" = enabled ] || fail "the service is not enabled"
	in_systemd timeout 60 sh -c 'until systemctl is-active gpuwarden; do
		! systemctl --quiet is-failed gpuwarden || exit 1
		sleep 0.2
	done' || fail "$(in_systemd journalctl --no-pager --unit gpuwarden)"
	in_systemd timeout 60 /usr/lib/gpuwarden/bin/python3 -I -c '
import time
from agent.exporters.api.client import PATH, fetch

while (snapshot := fetch(PATH)) is None:
    time.sleep(0.2)
print(snapshot.devices)'
	in_systemd systemctl status --no-pager gpuwarden
}

upgrade_under_systemd() {
	local before
	before=$(main_process)
	cp "$work"/packages/*.deb "$root/var/tmp"
	in_systemd sh -c 'DEBIAN_FRONTEND=noninteractive dpkg --install /var/tmp/gpuwarden*.deb'
	rm "$root"/var/tmp/gpuwarden*.deb
	in_systemd systemctl is-active gpuwarden || fail "the upgrade has not started it"
	[ "$(main_process)" != "$before" ] || fail "the agent of $earlier runs on"
}
main_process() { in_systemd systemctl show --property=MainPID --value gpuwarden; }

remove_under_systemd() {
	in_systemd env DEBIAN_FRONTEND=noninteractive dpkg --remove gpuwarden-sim gpuwarden
	! in_systemd systemctl --quiet is-active gpuwarden || fail "the service runs on without its package"
	! in_systemd test -e /sys/fs/cgroup/system.slice/gpuwarden.service || fail "a process of it runs on"
	in_systemd env DEBIAN_FRONTEND=noninteractive dpkg --purge gpuwarden-sim gpuwarden
	for path in etc/gpuwarden run/gpuwarden var/lib/gpuwarden; do
		! in_systemd test -e "/$path" || fail "left after purging: $path"
	done
	! in_systemd systemctl cat gpuwarden || fail "systemd still knows the unit"
}

step() { # $1: what it shows; then a function and its words
	local title=$1 began=${EPOCHREALTIME/./} shown=${1//[^ -~]/.}
	shift
	printf '%s %*s' "$title" $((66 - ${#shown})) ''
	if ! "$0" "$work" --step "$@" >"$log" 2>&1; then
		printf 'FAILED\n'
		tail -n 40 "$log" >&2
		exit 1
	fi
	cat "$log" >>"$work/log.all"
	awk -v us=$((${EPOCHREALTIME/./} - began)) 'BEGIN { printf "%6.1f s\n", us / 1e6 }'
}

end() {
	if [ -e "$work/throttled" ]; then kill -KILL "$(cat "$work/throttled")" 2>/dev/null || true; fi
	rm -f "$work/throttled"
	systemd delete --force gpuwarden-deb-life >/dev/null 2>&1 || true
}

live() {
	trap end EXIT
	rm -f "$work/log.all" "$work/throttled"
	if [ -z "${IS_BUILT:-}" ]; then
		step "build $version, lintian" build
		step "build $earlier of the same tree" build_an_earlier_version
	fi
	step "a fresh Debian ($suite)" make_a_fresh_debian
	mount_system "$root"
	step "what the packages depend on" install_what_it_depends_on
	step "note every file" note_files "$work/before"
	step "install $earlier" install_version "$work/earlier" "$earlier"
	step "policy, group, folders, nothing of it on a user's path" look_around
	step "the demo" run_the_demo
	step "upgrade to $version: keeps the policy, releases what is held" upgrade
	step "remove: releases what is held" remove
	step "purge" purge
	step "nothing is left: every file as before" compare_files
	step "systemd as PID 1 with $earlier installed" start_systemd
	step "its service is enabled, runs and answers" look_at_the_service
	step "upgrading to $version ends it and starts the new one" upgrade_under_systemd
	step "removing stops it, purging leaves nothing" remove_under_systemd
	echo "deb-life: done on $suite in $SECONDS s; the steps' output is in $work/log.all"
}

case "${2:-}" in
--step)
	shift 2
	"$@"
	;;
--inside) live ;;
*)
	[ "$(id -u)" -eq 0 ] || die "run as root"
	mkdir -p "$work"
	for suite in "${@:2}" $([ $# -ge 2 ] || echo "$suite"); do
		DEBIAN_SUITE=$suite unshare --mount --propagation private "packaging/deb/$(basename "$0")" "$(realpath "$work")" --inside
		export IS_BUILT=yes
	done
	;;
esac
