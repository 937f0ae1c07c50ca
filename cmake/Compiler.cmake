# ccache where it is installed, shared between checkouts, and one false alarm of a compiler.
find_program(DISAGMOE_CCACHE ccache)
if(DISAGMOE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}" CCACHE_NOHASHDIR=1
    CCACHE_SLOPPINESS=pch_defines,time_macros "${DISAGMOE_CCACHE}")
endif()

# g++ 12 warns of an overlapping copy in `"text" + std::to_string(n)` (GCC bug 105651).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  add_compile_options(-Wno-restrict)
endif()
