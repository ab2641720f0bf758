# UCX as the target tandem::ucx; UCX_ROOT says where it is if not in the system's folders. UCX brings
# a package of its own, but in Debian 13 that names a folder of headers that does not exist.
include(FindPackageHandleStandardArgs)

find_path(UCX_INCLUDE_DIR ucp/api/ucp.h)
find_library(UCX_UCP_LIBRARY ucp)
find_library(UCX_UCS_LIBRARY ucs)
mark_as_advanced(UCX_INCLUDE_DIR UCX_UCP_LIBRARY UCX_UCS_LIBRARY)
find_package_handle_standard_args(UCX
  REQUIRED_VARS UCX_INCLUDE_DIR UCX_UCP_LIBRARY UCX_UCS_LIBRARY
  REASON_FAILURE_MESSAGE "On Debian or Ubuntu: apt-get install libucx-dev")
if(UCX_FOUND AND NOT TARGET tandem::ucx)
  add_library(tandem::ucx INTERFACE IMPORTED)
  set_target_properties(tandem::ucx PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${UCX_INCLUDE_DIR}"
    INTERFACE_LINK_LIBRARIES "${UCX_UCP_LIBRARY};${UCX_UCS_LIBRARY}")
endif()
