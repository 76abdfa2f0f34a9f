// SPDX-License-Identifier: Apache-2.0
// How demo.cc writes: 100 columns, a name on the left and its text beside it, wrapped; on a terminal, texts that grow
// while they are made; and checks, which are counted.
#pragma once

#include <string>
#include <vector>

#include "samples/demo_host.h"

namespace demo {

// Printed with printf's rules, at once.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
void title(const std::string& text);

// The text beside its name, in lines of at most 100 columns; a line break in the text is one on the page.
std::string beside(const std::string& name, const std::string& text);
void note(const std::string& name, const char* format, ...) __attribute__((format(printf, 2, 3)));

// The stories' ends, a line each, in place while they grow; nothing where the output is no terminal of 100 columns. At
// the end the whole texts take their place.
class Growing {
 public:
  void draw(const std::vector<Story>& stories);
  void finish(const std::vector<Story>& stories);

 private:
  void erase();
  size_t lines_ = 0;
};

// A row a story: when it ran, in steps of the engine.
void chart(const std::vector<Story>& stories);

// Prints what was checked and whether it holds.
void expect(bool holds, const std::string& what);
int num_checks();
int num_failed();

// The first token in which they differ; the shorter one's length if it is all of the other's beginning.
size_t first_difference(const Story& one, const Story& other);
// Whether they have the same tokens and text; of one that its host cancelled, as far as it goes.
bool same(const Story& one, const Story& other);

}  // namespace demo
