"""Programs that take all they can, processes, memory, disk, output and time, or that do not end."""

PROGRAMS = r"""
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
