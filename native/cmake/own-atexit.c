// Part of every DLL that zig links. Its start code defines atexit, which LLD exports with all other functions, and a
// DLL that is linked with this one has an atexit of its own.
__asm__(".section .drectve,\"yn\"\n.ascii \" -exclude-symbols:atexit\"\n.text\n");

typedef int velo_own_atexit; // a C file must not be empty
