"""Programs that reach for the host: its files, devices, network, kernel and privileges."""

from __future__ import annotations

from tests.integration.sandbox.attacks import attacks

FILES = attacks(r"""
#: host files | leaks_bare=1
for path in host["secrets"] + ["/etc/shadow", "/etc/machine-id", "/var", "/home", "/sys", "/run", "/boot"]:
    refused(os.listdir if os.path.isdir(path) else open, path)
#: project files | leaks_bare=1
refused(open, host["project"])
refused(os.listdir, os.path.dirname(host["project"]))
#: writing outside
own = [sys.prefix, os.path.dirname(os.__file__)]
for folder in ["/", "/etc", "/usr", "/usr/bin", "/dev", "/proc", "/proc/sys", *own]:
    refused(open, folder + "/written-by-a-program", "w")
refused(open, host["secrets"][0], "w")
refused(os.unlink, sys.executable)
refused(os.rename, "/usr", "/tmp/usr")
refused(os.chmod, os.__file__, 0o666)
#: links to the host | leaks_bare=1
for number, path in enumerate(host["secrets"]):
    os.symlink(path, f"link{number}")
    refused(open, f"link{number}")
    refused(os.link, path, f"hard{number}")
os.symlink("/", "root")
refused(open, "root/etc/shadow")
os.symlink("../" * 30 + host["secrets"][0].lstrip("/"), "up")
refused(open, "up")
#: roots in /proc
for door in ["/proc/self/root", "/proc/1/root", "/proc/thread-self/root", "/proc/1/cwd/../.."]:
    for path in host["secrets"]:
        refused(open, door + path)
for fd in os.listdir("/proc/1/fd"):
    target = os.readlink(f"/proc/1/fd/{fd}")
    if target != "/dev/null" and not target.startswith(("pipe:", "anon_inode:")):
        leak(f"the first process has {target} open")
#: handles of files
numbers = {"x86_64": (303, 304), "aarch64": (264, 265)}[os.uname().machine]
for number in numbers:
    if libc.syscall(number, -100, b"/", ctypes.create_string_buffer(128), None, 0) >= 0:
        leak("a file handle")
    if ctypes.get_errno() != errno.EPERM:
        leak(f"the call is not refused but failed: {ctypes.get_errno()}")
#: removing all | language=bash
rm -rf --no-preserve-root /bin /etc /proc/1 /dev /usr/sbin /tmp/* 2>/dev/null
[ -x /usr/bin/env ] || echo LEAK
echo contained
#: own folder removed | language=bash
cd /tmp && rm -rf run && mkdir run 2>/dev/null; rm -rf /tmp/run; echo contained
#: mounts
for source, target, kind, flags in [
    (b"x", b"/tmp", b"tmpfs", 0), (b"/", b"/tmp", None, 4096), (b"x", b"/usr", None, 32 | 4096),
    (b"proc", b"/tmp", b"proc", 0), (b"x", b"/tmp", b"cgroup2", 0), (b"x", b"/tmp", b"sysfs", 0),
]:
    if libc.mount(source, target, kind, flags, None) == 0:
        leak(f"mounted {target}")
for target in [b"/usr", b"/proc", b"/tmp", b"/etc/alternatives"]:
    if libc.umount2(target, 2) == 0:
        leak(f"unmounted {target}")
refused(os.chroot, "/tmp")
if libc.syscall({"x86_64": 155, "aarch64": 41}[os.uname().machine], b"/tmp", b"/tmp") == 0:
    leak("pivot_root")
for number in (428, 429, 430, 431, 432, 433, 442):
    if libc.syscall(number, -1, b"/", 0, 0, 0) >= 0:
        leak(f"mount call {number}")
#: device nodes
import stat
character, block = stat.S_IFCHR, stat.S_IFBLK
for kind, major, minor in [(character, 1, 1), (character, 1, 3), (block, 8, 0), (block, 254, 0)]:
    refused(os.mknod, "/tmp/device", kind | 0o666, os.makedev(major, minor))
for name in "mem kmem port kmsg sda vda kvm fuse net/tun loop-control vsock nvidia0".split():
    refused(open, f"/dev/{name}", "rb")
known = "null zero full random urandom tty ptmx pts shm fd core stdin stdout stderr"
if set(os.listdir("/dev")) - set(known.split()):
    leak(os.listdir("/dev"))
""")

KERNEL = attacks(r"""
#: kernel switches
for name in ["kernel/core_pattern", "kernel/hostname", "kernel/sysrq", "kernel/modprobe", "vm/drop_caches",
             "user/max_user_namespaces", "fs/binfmt_misc/register"]:
    refused(open, "/proc/sys/" + name, "w")
refused(open, "/proc/sysrq-trigger", "w")
#: kernel secrets | leaks_bare=1
for path in ["/proc/cmdline", "/proc/keys", "/proc/kcore", "/proc/kmsg", "/proc/1/stack", "/proc/kpageflags"]:
    try:
        found = open(path, "rb").read(10)
    except OSError:
        continue
    if found:
        leak(path)
if libc.klogctl(3, ctypes.create_string_buffer(4096), 4096) > 0:
    leak("the kernel's log")
#: keyrings | leaks_bare=1
add, request, control = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}[os.uname().machine]
for ring in range(-8, 0):
    if libc.syscall(control, 0, ring, 1) >= 0:
        leak(f"keyring {ring}")
    if libc.syscall(add, b"user", b"name", b"value", 5, ring) >= 0:
        leak(f"added to keyring {ring}")
    if libc.syscall(request, b"user", b"name", None, ring) >= 0:
        leak(f"asked for a key in {ring}")
if libc.syscall(control, 1, None) >= 0:
    leak("joined a session keyring")
#: dangerous calls
machine = os.uname().machine == "aarch64"
calls = {"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "quotactl": (179, 60),
         "io_uring_setup": (425, 425), "kexec_load": (246, 104), "init_module": (175, 105), "acct": (163, 89),
         "reboot": (169, 142), "swapon": (167, 224), "settimeofday": (164, 170), "memfd_secret": (447, 447)}
buffer = ctypes.create_string_buffer(256)
for name, numbers in calls.items():
    if libc.syscall(numbers[machine], 0, buffer, 0, 0, 0) >= 0:
        leak(name)
#: clock and name
refused(time.clock_settime, time.CLOCK_REALTIME, 0)
refused(socket.sethostname, "x")
if socket.gethostname() != "sandbox":
    leak(socket.gethostname())
#: setuid programs
import shutil, subprocess
if os.geteuid() == 0 or 0 in os.getgroups() or os.getegid() == 0:
    leak("root")
for call in [os.setuid, os.seteuid, os.setgid]:
    refused(call, 0)
refused(os.setgroups, [0])
refused(os.setresuid, 0, 0, 0)
shutil.copy("/bin/bash", "/tmp/shell")
os.chmod("/tmp/shell", 0o6755)
seen = subprocess.run(["/tmp/shell", "-p", "-c", "echo $EUID"], capture_output=True, text=True).stdout
if seen.strip() != str(os.getuid()):
    leak(seen)
for command in (["su", "-c", "id"], ["sudo", "-n", "id"], ["mount", "-t", "tmpfs", "x", "/tmp"]):
    if shutil.which(command[0]):
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            leak(command)
state = open("/proc/self/status").read()
if "NoNewPrivs:\t1" not in state or "CapEff:\t0000000000000000" not in state or "Seccomp:\t2" not in state:
    leak(state)
#: namespaces
for flag in [0x10000000, 0x20000, 0x40000000, 0x20000000, 0x4000000, 0x8000000, 0x2000000]:
    if libc.unshare(flag) == 0:
        leak(f"unshare {flag:#x}")
    number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    child = libc.syscall(number, flag | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    if child > 0:
        leak(f"clone {flag:#x}")
for name in os.listdir("/proc/1/ns"):
    with contextlib.suppress(OSError):
        if libc.setns(os.open(f"/proc/1/ns/{name}", os.O_RDONLY), 0) == 0:
            leak(f"setns {name}")
arguments = (ctypes.c_uint64 * 8)(0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
child = libc.syscall(435, arguments, ctypes.sizeof(arguments))
if child == 0:
    os._exit(0)
if child > 0:
    leak("clone3 made a user namespace")
#: namespaces by programs | language=bash
unshare -Ur true 2>/dev/null && echo LEAK unshare
unshare -n true 2>/dev/null && echo LEAK unshare -n
nsenter -t 1 -m true 2>/dev/null && echo LEAK nsenter
bwrap --unshare-user --ro-bind / / true 2>/dev/null && echo LEAK bwrap
chroot /tmp true 2>/dev/null && echo LEAK chroot
echo contained
#: tracing
pid = os.fork()
if pid == 0:
    signal.pause()
for target in (1, os.getppid(), pid):
    for request in (16, 0x4206):
        if libc.ptrace(request, target, None, None) == 0:
            leak(f"ptrace {request} {target}")
if libc.ptrace(0, 0, None, None) == 0:
    leak("traceme")
here, there = ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)
pair = (ctypes.c_size_t * 2)(ctypes.addressof(here), 8)
if libc.process_vm_readv(pid, pair, 1, pair, 1, 0) >= 0:
    leak("process_vm_readv")
os.kill(pid, signal.SIGKILL)
#: terminal
import fcntl, pty
refused(open, "/dev/tty")
ends = pty.openpty()
for fd in (0, 1, 2, *ends):
    for command in (0x5412, 0x541C):
        refused(fcntl.ioctl, fd, command, b"x")
#: priorities
refused(os.nice, -1)
refused(os.setpriority, os.PRIO_PROCESS, 0, -20)
refused(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
number = {"x86_64": 251, "aarch64": 30}[os.uname().machine]
if libc.syscall(number, 1, 0, 1 << 13) == 0:
    leak("real-time disk priority")
refused(open("/proc/self/oom_score_adj", "w", buffering=1).write, "-1000\n")
""")

NETWORK = attacks(r"""
#: loopback of the host | leaks_bare=1
for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    with socket.socket(family) as caller:
        caller.settimeout(1)
        refused(caller.connect, (address, host["port"]))
#: abstract sockets of the host | leaks_bare=1
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    refused(socket.socket(socket.AF_UNIX, kind).connect, chr(0) + host["name"])
#: sockets in files of the host
refused(socket.socket(socket.AF_UNIX).connect, host["socket"])
#: other machines
for address in ("192.0.2.1", "10.0.0.1", "169.254.169.254"):
    caller = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    refused(caller.sendto, b"x", (address, 53))
    caller = socket.socket()
    caller.settimeout(1)
    refused(caller.connect, (address, 80))
refused(socket.getaddrinfo, "name.invalid", 80)
if open("/proc/net/dev").read().count(":") != 1:
    leak("there are other interfaces than loopback")
#: other kinds of sockets | leaks_bare=1
for family in (16, 17, 29, 30, 31, 38, 40, 44):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        refused(socket.socket, family, kind)
refused(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)
refused(socket.socket, socket.AF_INET6, socket.SOCK_RAW, 58)
#: environment
known = "PATH HOME TMPDIR USER LANG PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS OPENBLAS_NUM_THREADS PWD LC_CTYPE"
if set(os.environ) - set(known.split()):
    leak(os.environ)
for pid in filter(str.isdigit, os.listdir("/proc")):
    found = open(f"/proc/{pid}/environ", "rb").read() + open(f"/proc/{pid}/cmdline", "rb").read()
    if host["secret"].encode() in found or host["name"].encode() in found:
        leak(found)
#: inherited descriptors
for fd in range(3, 1024):
    refused(os.fstat, fd)
# What another process of the sandbox writes, or is yet to read, could be taken from a pipe it shares.
own = {os.stat(f"/proc/self/fd/{fd}").st_ino for fd in range(3)}
for path in glob.glob("/proc/[0-9]*/fd/*"):
    if not path.startswith(f"/proc/{os.getpid()}/") and os.stat(path).st_ino in own:
        leak(path)
""")

ATTACKS = {**FILES, **KERNEL, **NETWORK}
