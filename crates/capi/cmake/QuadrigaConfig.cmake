# Quadriga::quadriga is the shared library, Quadriga::static the static one.
get_filename_component(_quadriga_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET Quadriga::quadriga)
  add_library(Quadriga::quadriga SHARED IMPORTED)
  set_target_properties(Quadriga::quadriga PROPERTIES
    IMPORTED_LOCATION "${_quadriga_prefix}/lib/libquadriga.so.@VERSION@"
    IMPORTED_SONAME "libquadriga.so.@ABI@"
    INTERFACE_INCLUDE_DIRECTORIES "${_quadriga_prefix}/include")
  add_library(Quadriga::static STATIC IMPORTED)
  set_target_properties(Quadriga::static PROPERTIES
    IMPORTED_LOCATION "${_quadriga_prefix}/lib/libquadriga.a"
    INTERFACE_INCLUDE_DIRECTORIES "${_quadriga_prefix}/include")
  separate_arguments(_quadriga_private UNIX_COMMAND "@PRIVATE@")
  set_property(TARGET Quadriga::static PROPERTY INTERFACE_LINK_LIBRARIES ${_quadriga_private})
endif()
