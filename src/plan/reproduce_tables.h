// The tables of `disagmoe reproduce`, one function each.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "plan/evaluate.h"
#include "plan/reproduce.h"
#include "plan/text.h"

namespace disagmoe {

using Progress = std::function<void(const std::string&)>;

// Against the baselines, and the same with equal dispatch and efficiencies.
ClaimTable SpeedUpTable(const Progress& progress);
ClaimTable SpeedUpEqualTable(const Progress& progress);
ClaimTable NeededTable(const Progress& progress);         // what all-to-all efficiency the claim needs
ClaimTable BestLayoutsTable(const Progress& progress);    // every schedule with its best layout that fits
ClaimTable ExposedTable(const Progress& progress);        // exposed communication removed
ClaimTable SplitTable(const Progress& progress);          // best A:F split
ClaimTable TopkTable(const Progress& progress);           // top-k x EP
ClaimTable VirtualStagesTable(const Progress& progress);  // v at fixed p
ClaimTable AllToAllShareTable(const Progress& progress);  // share of an MoE layer
ClaimTable SharesTable(const Progress& progress);         // attention and FFN shares, bounds
ClaimTable BubbleTable(const Progress& progress);         // warm-up formulas
ClaimTable MemoryTable(const Progress& progress);         // 18 bytes a parameter
ClaimTable OtherRunsTable(const Progress& progress);      // published runs of others

// A job on a cluster preset with the schedule's own settings.
Job MakeJob(const std::string& model, const std::string& cluster, const std::string& schedule, int64_t seq_length);
// Colocated as in the paper: EP 16 over two nodes, PP for the rest, the best v and b; without a limit of memory.
Evaluation Baseline(Job job, int ep = 16);
// The best of tutel's degrees and so on are in the search; settings in `fixed` stay.
Evaluation Best(const Job& job, const Fixed& fixed);
// Two pools on whole nodes of their own: p groups of m + n; the best b and q; without a limit of memory.
Evaluation TwoPools(Job job, int p, int m, int n);

std::string Efficiencies(const Job& job);

}  // namespace disagmoe
