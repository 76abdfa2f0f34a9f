# SPDX-License-Identifier: Apache-2.0
# cmake -DPROGRAM=... -DWANTED=... -P layout_test.cmake: what PROGRAM prints must be the committed list.
execute_process(COMMAND ${PROGRAM} OUTPUT_VARIABLE printed RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${PROGRAM} ended with ${status}")
endif()
file(READ ${WANTED} wanted)
if(NOT printed STREQUAL wanted)
  message(FATAL_ERROR "the layout changed; wanted ${WANTED}, got\n${printed}")
endif()
