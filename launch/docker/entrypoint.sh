#!/usr/bin/env bash
# What a node's container runs: an sshd that takes keys only, or the command given to the container instead.
#
#   Z2ALL_SSH_PORT         port of the sshd (default 2222: with host networking, 22 is the machine's own)
#   Z2ALL_SSH_ADDRESS      where it listens (default: everywhere)
#   Z2ALL_AUTHORIZED_KEYS  public keys that may enter as root; mount it read-only (default /etc/z2all/authorized_keys)
#   Z2ALL_HOST_KEYS        folder of the node's own key; keep it on a volume (default /etc/z2all/host_keys)
#   Z2ALL_OVERLAY          1: allow ssh tunnels, for `z2all cluster overlay up` (default 0)
#   Z2ALL_SSHD_FOLDER      what is made at every start (default /run/z2all)
set -euo pipefail

# One line: what, rule, fix; exit code 6 is MachineError's.
fail() { printf 'MachineError: %s\n' "$*" >&2; exit 6; }

[ "$#" -eq 0 ] || exec "$@"

port=${Z2ALL_SSH_PORT:-2222}
address=${Z2ALL_SSH_ADDRESS:-}
authorized=${Z2ALL_AUTHORIZED_KEYS:-/etc/z2all/authorized_keys}
host_key=${Z2ALL_HOST_KEYS:-/etc/z2all/host_keys}/ssh_host_ed25519_key
folder=${Z2ALL_SSHD_FOLDER:-/run/z2all}
sshd=/usr/sbin/sshd # by its whole path: it starts itself anew for every connection

check_settings() {
    [[ $port =~ ^[0-9]{1,5}$ ]] && ((10#$port >= 1 && 10#$port <= 65535)) ||
        fail "Z2ALL_SSH_PORT=$port: must be 1 to 65535. Give the port of the hostfile, or leave it out for 2222."
    [[ $address =~ ^[0-9A-Fa-f.:]*$ ]] ||
        fail "Z2ALL_SSH_ADDRESS=$address: must be an address in numbers. Correct it, or leave it out to listen everywhere."
    [[ ${Z2ALL_OVERLAY:-0} =~ ^[01]$ ]] || fail "Z2ALL_OVERLAY=$Z2ALL_OVERLAY: must be 0 or 1. Correct it."
}

# Says nothing of what is in the file.
check_authorized_keys() {
    [ ! -d "$authorized" ] ||
        fail "$authorized: is a folder, which docker makes where the file to mount is missing. Remove it on the machine and mount your public key."
    [ -f "$authorized" ] ||
        fail "$authorized: is missing, and nobody could log in. Mount your public key: -v ~/.ssh/z2all_docker.pub:$authorized:ro"
    ! grep -q 'PRIVATE KEY' "$authorized" ||
        fail "$authorized: is a private key, which belongs on no node. Mount the file that ends in .pub."
    ssh-keygen -l -f "$authorized" >/dev/null 2>&1 ||
        fail "$authorized: holds no public key. Make one with ssh-keygen -t ed25519 and mount the file that ends in .pub."
}

# Sessions do not get the container's environment. These are for building and running ops; what a rank needs beside them
# comes with the launch, keys for services too, so that no secret is ever written here.
session_environment() {
    local name value
    for name in PATH TORCH_EXTENSIONS_DIR DS_ACCELERATOR CUDA_HOME CUDA_VISIBLE_DEVICES TORCH_CUDA_ARCH_LIST MAX_JOBS; do
        value=${!name:-}
        [[ $value != *[\"\\$'\n']* ]] || fail "$name: has a quote, a backslash or a line break in it. Give it without."
        [ -z "$value" ] || printf ' "%s=%s"' "$name" "$value"
    done
}

# All of SetEnv in one line: sshd takes the first such line and ignores the others.
sshd_config() {
    cat <<END
Port $port
${address:+ListenAddress $address}
HostKey $host_key
AuthorizedKeysFile $folder/authorized_keys
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PermitRootLogin prohibit-password
AllowUsers root
PermitTunnel $([ "${Z2ALL_OVERLAY:-0}" = 1 ] && echo yes || echo no)
X11Forwarding no
PrintMotd no
PidFile none
MaxStartups 100
SetEnv$environment
END
}

check_settings
check_authorized_keys
environment=$(session_environment)
umask 077
mkdir -p "$folder" "$(dirname "$host_key")"
mkdir -p -m 755 /run/sshd # sshd wants it
# A copy: on its machine the file belongs to whoever mounted it, and sshd takes none that is not root's.
cat "$authorized" >"$folder/authorized_keys"
# Made here and not in the image, where all nodes and all who have the image would share it.
[ -s "$host_key" ] || ssh-keygen -q -t ed25519 -N '' -C '' -f "$host_key" </dev/null
sshd_config >"$folder/sshd_config"
"$sshd" -t -f "$folder/sshd_config" || fail "sshd: refuses its settings (its words are above). Correct the variables, or remove $host_key if it is damaged."
exec "$sshd" -D -e -f "$folder/sshd_config"
