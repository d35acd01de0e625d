# Read by the build of llama-cpp-python: the server needs llama and ggml, not llama.cpp's
# library of command-line utilities, which would more than double the build. The build
# forces this option on in its cache; a variable of the same name wins over that.
set(LLAMA_BUILD_COMMON OFF)
