#!/usr/bin/env bash
# Entry point of a node's container: an sshd that accepts keys only, or the command given to the container.
#
#   Z2ALL_SSH_PORT         port of the sshd (default 2222: with host networking, the machine itself uses 22)
#   Z2ALL_SSH_ADDRESS      address it listens on (default: all)
#   Z2ALL_AUTHORIZED_KEYS  public keys that may log in as root; mount it read-only (default /etc/z2all/authorized_keys)
#   Z2ALL_HOST_KEYS        folder of the node's host key; keep it on a volume (default /etc/z2all/host_keys)
#   Z2ALL_OVERLAY          1: allow ssh tunnels, for `z2all cluster overlay up` (default 0)
#   Z2ALL_SSHD_FOLDER      files created at every start (default /run/z2all)
set -euo pipefail

# One line: value, rule, fix. Exit code 6 is that of MachineError.
fail() { printf 'MachineError: %s\n' "$*" >&2; exit 6; }

[ "$#" -eq 0 ] || exec "$@"

port=${Z2ALL_SSH_PORT:-2222}
address=${Z2ALL_SSH_ADDRESS:-}
authorized=${Z2ALL_AUTHORIZED_KEYS:-/etc/z2all/authorized_keys}
host_key=${Z2ALL_HOST_KEYS:-/etc/z2all/host_keys}/ssh_host_ed25519_key
folder=${Z2ALL_SSHD_FOLDER:-/run/z2all}
sshd=/usr/sbin/sshd # absolute path, because sshd re-executes itself for every connection

check_settings() {
    [[ $port =~ ^[0-9]{1,5}$ ]] && ((10#$port >= 1 && 10#$port <= 65535)) ||
        fail "Z2ALL_SSH_PORT=$port: must be 1 to 65535. Use the port in the hostfile, or unset it for 2222."
    [[ $address =~ ^[0-9A-Fa-f.:]*$ ]] ||
        fail "Z2ALL_SSH_ADDRESS=$address: must be a numeric address. Correct it, or unset it to listen on all addresses."
    [[ ${Z2ALL_OVERLAY:-0} =~ ^[01]$ ]] || fail "Z2ALL_OVERLAY=$Z2ALL_OVERLAY: must be 0 or 1. Correct it."
}

# Never print the content of the file.
check_authorized_keys() {
    [ ! -d "$authorized" ] ||
        fail "$authorized: is a folder, which docker creates if the file to mount is missing. Remove it on the machine and mount your public key."
    [ -f "$authorized" ] ||
        fail "$authorized: is missing, so nobody could log in. Mount your public key: -v ~/.ssh/z2all_docker.pub:$authorized:ro"
    ! grep -q 'PRIVATE KEY' "$authorized" ||
        fail "$authorized: is a private key, which must not be on a node. Mount the file that ends in .pub."
    ssh-keygen -l -f "$authorized" >/dev/null 2>&1 ||
        fail "$authorized: contains no public key. Create one with ssh-keygen -t ed25519 and mount the file that ends in .pub."
}

# ssh sessions do not get the container's environment. These variables are for building and running ops. The launch
# sends everything else a rank needs, including API keys, so that no secret is ever written here.
session_environment() {
    local name value
    for name in PATH TORCH_EXTENSIONS_DIR DS_ACCELERATOR CUDA_HOME CUDA_VISIBLE_DEVICES TORCH_CUDA_ARCH_LIST MAX_JOBS; do
        value=${!name:-}
        [[ $value != *[\"\\$'\n']* ]] || fail "$name: contains a quote, a backslash or a line break. Remove it."
        [ -z "$value" ] || printf ' "%s=%s"' "$name" "$value"
    done
}

# All of SetEnv on one line: sshd uses the first such line and ignores the others.
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
mkdir -p -m 755 /run/sshd # required by sshd
# Copy it: the mounted file belongs to a user of the machine, and sshd only accepts files owned by root.
cat "$authorized" >"$folder/authorized_keys"
# Created here, not in the image: all nodes, and everyone with the image, would share it.
[ -s "$host_key" ] || ssh-keygen -q -t ed25519 -N '' -C '' -f "$host_key" </dev/null
sshd_config >"$folder/sshd_config"
"$sshd" -t -f "$folder/sshd_config" || fail "sshd: rejects its settings (see its message above). Correct the variables, or remove $host_key if it is damaged."
exec "$sshd" -D -e -f "$folder/sshd_config"
