# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` puts where: headers, the shared library, a pkg-config file and a CMake package, so that a host
# needs only `pkg-config moelora` or `find_package(moelora)` and `moelora::moelora`. Everything refers to itself by
# relative paths: an installed tree can be moved. tests/api/install_test.sh holds it.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/moelora)
install(TARGETS moelora EXPORT moelora_targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES ${PROJECT_SOURCE_DIR}/include/moelora.h ${PROJECT_SOURCE_DIR}/include/moelora_experimental.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT moelora_targets NAMESPACE moelora:: DESTINATION ${package_dir} FILE moeloraTargets.cmake)

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/moeloraConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/packaging/moeloraConfig.cmake INSTALL_DESTINATION ${package_dir})
# In 0.x each minor version may break.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/packaging/moeloraConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/packaging/moeloraConfig.cmake
              ${PROJECT_BINARY_DIR}/packaging/moeloraConfigVersion.cmake DESTINATION ${package_dir})

file(RELATIVE_PATH pc_to_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" pc_to_prefix "${pc_to_prefix}")
configure_file(${CMAKE_CURRENT_LIST_DIR}/moelora.pc.in ${PROJECT_BINARY_DIR}/packaging/moelora.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/packaging/moelora.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
