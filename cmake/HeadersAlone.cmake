# Target headers_alone (not part of `all`): compiles each header by itself, so that none relies on what was included
# before it. Headers that see libtorch share a precompiled ATen.h, which they therefore may not forget unnoticed.
function(disagmoe_headers_alone target)
  cmake_parse_arguments(H "" "" "FOLDERS;LIBS;PRECOMPILE" ${ARGN})
  set(sources)
  foreach(folder ${H_FOLDERS})
    file(GLOB headers CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/src/${folder}/*.h)
    if(NOT TARGET disagmoe_ucx)
      list(FILTER headers EXCLUDE REGEX "/ucx_")  # of the sources that are left out then
    endif()
    foreach(header ${headers})
      set(source ${CMAKE_BINARY_DIR}/headers_alone/${header}.cc)
      file(CONFIGURE OUTPUT ${source} CONTENT "#include \"${header}\"  // twice: is it guarded?\n#include \"${header}\"\n")
      list(APPEND sources ${source})
    endforeach()
  endforeach()
  if(NOT sources)
    return()
  endif()
  add_library(${target} OBJECT EXCLUDE_FROM_ALL ${sources})
  target_link_libraries(${target} PRIVATE ${H_LIBS})
  if(H_PRECOMPILE)
    target_precompile_headers(${target} PRIVATE ${H_PRECOMPILE})
  endif()
  add_dependencies(headers_alone ${target})
endfunction()

add_custom_target(headers_alone)
disagmoe_headers_alone(headers_alone_light FOLDERS base schedule spec cost trace sim plan io transport cli
  LIBS disagmoe_base disagmoe_transport)
if(DISAGMOE_FULL)
  disagmoe_headers_alone(headers_alone_torch FOLDERS layers runtime LIBS disagmoe_base disagmoe_transport disagmoe_torch
    PRECOMPILE <ATen/ATen.h>)
endif()
