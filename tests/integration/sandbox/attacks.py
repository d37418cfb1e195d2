"""Programs that reach for the host, beyond what the sandbox itself tries (`escape_attempts.py`) before it is used.

Below them are those that take all they can, processes, memory, disk, output and time, or that do not end.
"""

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
#: fork bomb | language=bash stopped=time seconds=1
:(){ :|:& };:; sleep 100
#: signals to everybody
for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGHUP, signal.SIGSEGV):
    os.kill(1, number)
refused(os.kill, os.getppid() if os.getppid() > 1 else 70000, signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
refused(os.kill, -1, signal.SIGTERM)
os.killpg(0, signal.SIGTERM)
for pid in range(1, 40000):
    if pid != os.getpid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
#: suicide of all | stopped=somehow
os.kill(0, signal.SIGKILL)
#: exit code forged
for path in ("/proc/1/mem", f"/proc/{os.getppid()}/mem", "/proc/self/mem"):
    refused(open, path, "rb+")
first = os.pidfd_open(1)
for fd in range(3, 64):
    taken = libc.syscall(438, first, fd, 0)
    if taken >= 0:
        leak(f"descriptor {fd} of the first process: {os.readlink(f'/proc/self/fd/{taken}')}")
#: signals ignored | stopped=time seconds=1
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    pass
#: daemon that outlives
if os.fork() == 0:
    os.setsid()
    libc.prctl(1, 0)
    if os.fork() == 0:
        os.closerange(0, 100)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1000)
    os._exit(0)
#: daemon that holds the output
if os.fork() == 0:
    os.setsid()
    time.sleep(1000)
#: daemons that keep being born
def live():
    while True:
        if os.fork():
            os._exit(0)
        os.setsid()
if os.fork() == 0:
    libc.prctl(36, 1)
    live()
#: core files
import subprocess
if subprocess.run([sys.executable, "-c", "import os; os.abort()"], stderr=subprocess.DEVNULL).returncode != -6:
    leak("abort does not abort")
if [name for name in os.listdir(".") if "core" in name]:
    leak("core file")
#: memory of many | stopped=memory memory=128
import mmap
for _ in range(12):
    if os.fork() == 0:
        block = mmap.mmap(-1, 60 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for _ in range(60):
            block.write(b"x" * (1 << 20))
        signal.pause()
signal.pause()
#: memory of no process
import mmap
def shared(fd):
    block = mmap.mmap(fd, 1 << 20)
    block.write(bytes(1 << 20))
    block.madvise(mmap.MADV_DONTNEED)
    return "held by the kernel alone"
refused(shared, -1)
with open("/dev/zero", "rb+", buffering=0) as zero:
    refused(shared, zero.fileno())
    if zero.read(1000) != bytes(1000):
        leak("/dev/zero has no zeros")
#: buffers made larger
import fcntl
refused(fcntl.fcntl, os.pipe()[1], 1031, 1 << 20)
for option in (socket.SO_SNDBUF, 32):
    refused(socket.socketpair()[0].setsockopt, socket.SOL_SOCKET, option, 4 << 20)
#: buffers of sockets of many | stopped=memory memory=256
for _ in range(24):
    if os.fork() == 0:
        pairs = []
        while True:
            with contextlib.suppress(OSError):
                pairs.append(socket.socketpair())
                for end in pairs[-1]:
                    end.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        while True:
                            end.send(bytes(65536))
signal.pause()
#: messages of closed sockets | stopped=memory memory=256
def keep():
    receivers = []
    with contextlib.suppress(OSError):
        for number in range(200):
            receivers.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            receivers[-1].bind(f"\0{os.getpid()} {number}")
            for _ in range(10):
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                    sender.setblocking(False)
                    sender.sendto(bytes(200_000), f"\0{os.getpid()} {number}")
    held = b"x" * (8 << 20)  # a full control group may only refuse messages; of memory it kills
    signal.pause()
for _ in range(8):
    if os.fork() == 0:
        keep()
signal.pause()
#: memory locked
if libc.mlockall(3) == 0:
    leak("mlockall")
address = libc.mmap(None, 1 << 20, 3, 0x22, -1, 0)
if libc.mlock(ctypes.c_void_p(address), 1 << 20) == 0:
    leak("mlock")
#: disk
for folder, most in (("/tmp", 64), ("/dev/shm", 16)):
    with contextlib.suppress(OSError):
        for number in range(most + 1):
            with open(f"{folder}/{number}", "wb") as file:
                file.write(bytes(1 << 20))
        leak(f"{most + 1} MB in {folder}")
    for path in glob.glob(f"{folder}/[0-9]*"):
        os.unlink(path)
#: millions of files | stopped=somehow seconds=2
number = 0
while True:
    number += 1
    try:
        os.mknod(f"/tmp/{number}")
    except OSError:
        os.mkdir(f"/dev/shm/{number}")
#: deep folders
for _ in range(3000):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
refused(os.open, "/".join(["d" * 200] * 100), os.O_RDONLY)
#: buffers of sockets and pipes
pairs = []
with contextlib.suppress(OSError):
    while True:
        pairs.append(socket.socketpair())
        pairs[-1][0].setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                pairs[-1][0].send(bytes(65536))
#: flood of stdout
for _ in range(500):
    sys.stdout.write("x" * 100_000)
#: flood of both, endless | stopped=time seconds=1
threading.Thread(target=lambda: [sys.stderr.write("x" * 100_000) for _ in iter(int, 1)]).start()
while True:
    sys.stdout.write("x" * 100_000)
#: bytes that are no text
sys.stdout.flush()
os.write(1, bytes(range(256)) * 100 + b"\xed\xa0\x80\x00\x1b[2J\n")
#: output closed for good | stopped=somehow
os.close(1)
os.close(2)
time.sleep(0.05)
os._exit(0)
#: pipe made slow
import fcntl
refused(fcntl.fcntl, 1, 1031, 4096)
fcntl.fcntl(1, fcntl.F_SETFL, os.O_NONBLOCK | os.O_DIRECT)
for _ in range(1000):
    with contextlib.suppress(BlockingIOError):
        os.write(1, b"x" * 10)
os.set_blocking(1, True)
print()
#: stdin never ends well | language=bash
cat; cat; exec 0<&-; cat 2>/dev/null; echo; echo contained
"""
