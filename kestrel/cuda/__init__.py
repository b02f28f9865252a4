"""The CUDA backend: kernels compiled by NVRTC at run time, loaded and launched through CuPy."""
