// Which instruction sets run here.
#pragma once

#include <string>

namespace sakiyomi {

// Narrowest first, separated by blanks.
std::string available_isas();

}  // namespace sakiyomi
