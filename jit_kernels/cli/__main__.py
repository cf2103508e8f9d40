from jit_kernels.cli import main

main()
