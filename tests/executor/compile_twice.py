"""Compiles kernels ahead, twice, and prints how many another process compiled each time."""

from contextlib import closing

from triton.compiler import compile as compile_source
from triton.compiler import make_backend

from octavo.executor.compile_ahead import CompileServer, ForkingExecutor, is_cached
from tests.executor.tiny_kernel import HOPPER, double, make_source


class CountingServer(CompileServer):
    """Counts the jobs that it is given."""

    num_jobs = 0

    def compile(self, job):
        super().compile(job)
        CountingServer.num_jobs += 1


def make_closure(src):
    """What Triton submits: a function that holds all it compiles with."""
    target, options, env_vars = HOPPER, make_backend(HOPPER).parse_options({}), {}

    def async_compile():
        assert is_cached(src, target, options, env_vars), "the other process has not compiled it"
        return compile_source(src, target=target, options=options.__dict__, _env_vars=env_vars)

    return async_compile


def main():
    double.hash = 64 * "0"  # the key that this process has for it, for whatever reason
    for _ in range(2):
        CountingServer.num_jobs = 0
        with closing(CountingServer()) as server, ForkingExecutor(server) as executor:
            closures = [make_closure(make_source(size)) for size in (128, 256, 512)]
            kernels = [executor.submit(closure) for closure in closures]
            assert all(kernel.result().asm["cubin"] for kernel in kernels)
        print("compiled", CountingServer.num_jobs)


if __name__ == "__main__":
    main()
