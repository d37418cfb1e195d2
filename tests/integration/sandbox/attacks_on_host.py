"""Programs that reach for the host, beyond what the sandbox itself tries (`escape_attempts.py`) before it is used."""

PROGRAMS = r"""
#: host files | leaks_bare=1
for path in host["secrets"] + ["/etc/shadow", "/etc/machine-id", "/var", "/home", "/sys", "/run", host["project"]]:
    refused(os.listdir if os.path.isdir(path) else open, path)
#: changing what is shown
for folder in ["/usr/bin", "/proc/sys", sys.prefix, os.path.dirname(os.__file__)]:
    refused(open, folder + "/written-by-a-program", "w")
refused(os.unlink, sys.executable)
refused(os.rename, "/usr", "/tmp/usr")
refused(os.chmod, os.__file__, 0o666)
#: links to the host | leaks_bare=1
for number, path in enumerate(host["secrets"]):
    os.symlink(path, f"link{number}")
    refused(open, f"link{number}")
    refused(os.link, path, f"hard{number}")
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
#: removing all | language=bash
rm -rf --no-preserve-root /bin /etc /proc/1 /dev /usr/sbin /tmp/* 2>/dev/null
[ -x /usr/bin/env ] || echo LEAK
cd /tmp && rm -rf run && mkdir run 2>/dev/null; rm -rf /tmp/run; echo contained
#: device nodes
import stat
for kind, major, minor in [(stat.S_IFCHR, 1, 1), (stat.S_IFCHR, 1, 3), (stat.S_IFBLK, 8, 0), (stat.S_IFBLK, 254, 0)]:
    refused(os.mknod, "/tmp/device", kind | 0o666, os.makedev(major, minor))
known = "null zero full random urandom tty ptmx pts shm fd core stdin stdout stderr"
if set(os.listdir("/dev")) - set(known.split()):
    leak(os.listdir("/dev"))
#: kernel switches and secrets | leaks_bare=1
for name in ["kernel/core_pattern", "kernel/hostname", "kernel/sysrq", "kernel/modprobe", "vm/drop_caches",
             "user/max_user_namespaces", "fs/binfmt_misc/register"]:
    refused(open, "/proc/sys/" + name, "w")
refused(open, "/proc/sysrq-trigger", "w")
for path in ["/proc/cmdline", "/proc/keys", "/proc/kcore", "/proc/kmsg", "/proc/1/stack", "/proc/kpageflags"]:
    with contextlib.suppress(OSError):
        if open(path, "rb").read(10):
            leak(path)
#: system calls
calls = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "syslog": (103, 116),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "quotactl": (179, 60), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "vmsplice": (278, 75), "inotify_init1": (294, 26), "fanotify_init": (300, 262), "pidfd_getfd": (438, 438),
    "kexec_load": (246, 104), "init_module": (175, 105), "acct": (163, 89), "reboot": (169, 142),
    "swapon": (167, 224),
}
for name, numbers in calls.items():
    result = libc.syscall(numbers[os.uname().machine == "aarch64"], 0, 0, 0, 0, 0, 0)
    if result >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        leak(f"{name} gave {result}, {errno.errorcode.get(ctypes.get_errno())}")
#: clock, name and priorities
refused(time.clock_settime, time.CLOCK_REALTIME, 0)
refused(socket.sethostname, "x")
if socket.gethostname() != "sandbox":
    leak(socket.gethostname())
refused(os.nice, -1)
refused(os.setpriority, os.PRIO_PROCESS, 0, -20)
refused(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
for pid in ("self", 1, os.getppid()):
    refused(open, f"/proc/{pid}/oom_score_adj", "w")
#: setuid programs
import shutil, subprocess
if os.geteuid() == 0 or 0 in os.getgroups() or os.getegid() == 0:
    leak("root")
for call in [os.setuid, os.seteuid, os.setgid]:
    refused(call, 0)
refused(os.setgroups, [0])
shutil.copy("/bin/bash", "/tmp/shell")
os.chmod("/tmp/shell", 0o6755)
seen = subprocess.run(["/tmp/shell", "-p", "-c", "echo $EUID"], capture_output=True, text=True).stdout
if seen.strip() != str(os.getuid()):
    leak(seen)
state = open("/proc/self/status").read()
if "NoNewPrivs:\t1" not in state or "CapEff:\t0000000000000000" not in state or "Seccomp:\t2" not in state:
    leak(state)
#: namespaces
for flag in [0x10000000, 0x20000, 0x40000000, 0x20000000, 0x4000000, 0x8000000, 0x2000000]:
    child = libc.syscall({"x86_64": 56, "aarch64": 220}[os.uname().machine], flag | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    if child > 0:
        leak(f"clone {flag:#x}")
arguments = (ctypes.c_uint64 * 8)(0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
child = libc.syscall(435, arguments, ctypes.sizeof(arguments))
if child == 0:
    os._exit(0)
if child > 0:
    leak("clone3 made a user namespace")
#: terminal
import fcntl, pty
refused(open, "/dev/tty")
ends = pty.openpty()
for fd in (0, 1, 2, *ends):
    for command in (0x5412, 0x541C):
        refused(fcntl.ioctl, fd, command, b"x")
#: sockets of the host | leaks_bare=1
for address in ("127.0.0.1", "::1"):
    refused(socket.create_connection, (address, host["port"]), 1)
for address in (host["socket"], chr(0) + host["name"]):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        refused(socket.socket(socket.AF_UNIX, kind).connect, address)
for family in (socket.AF_INET, socket.AF_INET6, 16, 17, 29, 30, 31, 38, 40, 44):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        refused(socket.socket, family, kind)
#: other machines
for address in ("192.0.2.1", "10.0.0.1", "169.254.169.254"):
    refused(socket.create_connection, (address, 80), 1)
refused(socket.getaddrinfo, "name.invalid", 80)
if open("/proc/net/dev").read().count(":") != 1:
    leak("there are other interfaces than loopback")
#: who opens the files of the host
import fcntl
refused(fcntl.fcntl, os.open("/usr/lib", os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_ACCESS | fcntl.DN_MULTISHOT)
refused(fcntl.fcntl, os.open(__file__, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)
#: environment
known = "PATH HOME TMPDIR USER LANG PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS OPENBLAS_NUM_THREADS PWD LC_CTYPE"
if set(os.environ) - set(known.split()):
    leak(os.environ)
for pid in filter(str.isdigit, os.listdir("/proc")):
    seen = open(f"/proc/{pid}/environ", "rb").read() + open(f"/proc/{pid}/cmdline", "rb").read()
    if host["secret"].encode() in seen or host["name"].encode() in seen:
        leak(seen)
#: inherited descriptors
for fd in range(3, 1024):
    refused(os.fstat, fd)
# What another process of the sandbox writes, or is yet to read, could be taken from a pipe it shares.
own = {os.stat(f"/proc/self/fd/{fd}").st_ino for fd in range(3)}
for path in glob.glob("/proc/[0-9]*/fd/*"):
    if not path.startswith(f"/proc/{os.getpid()}/") and os.stat(path).st_ino in own:
        leak(path)
"""
