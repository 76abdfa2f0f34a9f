// SPDX-License-Identifier: Apache-2.0
// Catch2: Debian's 2.13 (one header) or upstream 3.
#pragma once
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
