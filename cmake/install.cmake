# What `cmake --install` puts where: the library, its headers, the command, and a package that
# find_package(tandem) finds.
install(TARGETS tandem EXPORT tandem-targets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/tandem DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
set(tandem_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tandem)
install(EXPORT tandem-targets NAMESPACE tandem:: DESTINATION ${tandem_cmake_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/tandem-config.cmake.in
  ${PROJECT_BINARY_DIR}/tandem-config.cmake INSTALL_DESTINATION ${tandem_cmake_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tandem-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tandem-config.cmake
  ${PROJECT_BINARY_DIR}/tandem-config-version.cmake
  ${PROJECT_SOURCE_DIR}/cmake/FindUCX.cmake DESTINATION ${tandem_cmake_dir})
