# The launcher: a library of its own, so that tests link it without the commands.
add_library(disagmoe_launch STATIC ${CMAKE_CURRENT_LIST_DIR}/launch.cc ${CMAKE_CURRENT_LIST_DIR}/launch_process.cc)
target_link_libraries(disagmoe_launch PUBLIC disagmoe_base disagmoe_transport)
if(TARGET disagmoe)
  target_link_libraries(disagmoe PRIVATE disagmoe_launch)
endif()

if(DISAGMOE_TESTS)
  add_executable(launch_test_rank ${CMAKE_CURRENT_LIST_DIR}/launch_test_rank.cc)
  target_link_libraries(launch_test_rank PRIVATE disagmoe_launch)
  disagmoe_test(launch_test SOURCES ${CMAKE_CURRENT_LIST_DIR}/launch_test.cc LIBS disagmoe_launch)
  target_compile_definitions(launch_test PRIVATE LAUNCH_TEST_RANK="$<TARGET_FILE:launch_test_rank>")
  add_dependencies(launch_test launch_test_rank)
endif()
